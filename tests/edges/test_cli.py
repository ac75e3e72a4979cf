"""The command line as a user meets it: exit codes, one line an error, clean stdout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import onnx
import pytest

from conformance_cases import CASES
from graphs import decoder

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "shakespeare-onnx"
FIXTURES = ROOT / "tests" / "fixtures"
START = "from ortkv.cli import main; main()"


def ortkv(
    *args: object, stdin: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, *map(str, args)],
        input=stdin,
        env={**os.environ, "COLUMNS": "100", **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fails(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 1, result
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_generate_streams_the_continuation_alone() -> None:
    result = ortkv("generate", MODEL, "-p", "ROMEO:", "--max-new-tokens", 20)
    assert result.returncode == 0
    assert result.stderr == ""
    assert len(result.stdout.strip()) > 20
    assert not result.stdout.startswith("ROMEO:")
    echoed = ortkv("generate", MODEL, "--max-new-tokens", 20, "--echo", stdin="ROMEO:")
    assert echoed.stdout == "ROMEO:" + result.stdout


def test_sampling_options_reach_the_sampler() -> None:
    base = ("generate", MODEL, "-p", "ROMEO:", "-n", 20)
    greedy = ortkv(*base).stdout
    drawn = ortkv(*base, "--temperature", 1.5, "--seed", 1).stdout
    assert drawn != greedy
    assert drawn == ortkv(*base, "--temperature", 1.5, env={"ORTKV_GENERATE_SEED": "1"}).stdout
    assert ortkv(*base, "--temperature", 0).stdout == greedy
    assert ortkv(*base, "--temperature", 1.5, "--seed", 1, "--top-k", 1).stdout == greedy
    word = greedy.split()[1]
    stopped = ortkv(*base, "--stop", word).stdout
    assert word not in stopped
    assert greedy.startswith(stopped.rstrip("\n"))


def test_a_file_that_is_no_onnx(tmp_path: Path) -> None:
    """# hostile 25."""
    for content in (b"", b"hello, world", MODEL.joinpath("model.onnx").read_bytes()[:500]):
        file = tmp_path / "model.onnx"
        file.write_bytes(content)
        fails(ortkv("generate", file, "-p", "x"), "model.onnx", "not an ONNX model")


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    fails(ortkv("generate", tmp_path, "-p", "x"), "no .onnx file")


def test_a_path_that_is_not_there() -> None:
    fails(ortkv("inspect", ROOT / "models" / "shakespear"), "does not exist")


def test_a_prompt_longer_than_the_context() -> None:
    fails(ortkv("generate", MODEL, stdin="word " * 3000), "context of 512", "shorten")


def test_cuda_on_a_machine_without_it() -> None:
    """# hostile 35."""
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA; tests/gpu covers it")
    for provider in ("cuda", "cuda:1"):
        result = ortkv("generate", MODEL, "-p", "x", "--provider", provider)
        fails(result, "CUDAExecutionProvider", "pip install 'ortkv[gpu]'")


def test_a_provider_that_is_none() -> None:
    fails(ortkv("generate", MODEL, "-p", "x", "--provider", "gpu"), "cpu, cuda, cuda:N, auto")


def test_provider_auto_says_what_it_took() -> None:
    result = ortkv("generate", MODEL, "-p", "x", "-n", 2, "--provider", "auto")
    assert result.returncode == 0
    assert result.stderr.startswith("provider: ")


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    for name in ("model.onnx", "config.json", "model.onnx.data"):
        if (MODEL / name).exists():
            shutil.copy(MODEL / name, tmp_path)
    fails(ortkv("generate", tmp_path, "-p", "x"), "no tokenizer", "tokenizer.json")


def test_settings_out_of_range() -> None:
    """# hostile 41."""
    for option, value in (("--temperature", -1), ("--top-p", 1.5), ("--seed", 2**64)):
        result = ortkv("generate", MODEL, "-p", "x", option, value)
        fails(result, option.removeprefix("--").replace("-", "_"), "expected")


def test_wrong_usage_exits_2() -> None:
    for args in (("generate",), ("generate", MODEL, "--nope"), ("nope",)):
        result = ortkv(*args)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_no_prompt_at_a_terminal_is_wrong_usage() -> None:
    import pty

    ours, theirs = pty.openpty()
    result = subprocess.run(
        [sys.executable, "-c", START, "generate", str(MODEL)],
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(ours)
    os.close(theirs)
    assert result.returncode == 2
    assert "-p TEXT" in result.stderr


def test_stdin_that_is_not_utf8() -> None:
    """# hostile 44."""
    result = subprocess.run(
        [sys.executable, "-c", START, "generate", str(MODEL)],
        input=b"caf\xe9",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith(b"error: stdin is not UTF-8 (byte 0xe9 at 3)")


def test_ctrl_c_in_the_middle_exits_130_without_a_word() -> None:
    import signal

    with subprocess.Popen(
        [sys.executable, "-c", START, "generate", str(MODEL), "-p", "ROMEO:", "-n", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    "module", ["typer", "ortkv.cli", "numpy", "ml_dtypes", "onnx", "tokenizers", "onnxruntime"]
)
@pytest.mark.parametrize("nested", [False, True])
def test_ctrl_c_in_the_middle_of_an_import_exits_130_without_a_word(
    module: str, nested: bool
) -> None:
    """At the import's start, and once it has begun to import others."""
    code = (
        "import os, signal, sys\n"
        "begun = []\n"
        "def hook(event, args):\n"
        "    if event == 'import':\n"
        f"        if args[0].startswith({module + '.'!r} if {nested} else {module!r}):\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.addaudithook(hook)\n"
        "from ortkv.__main__ import main\n"
        "main()\n"
    )
    if nested and module in ("ortkv.cli", "ml_dtypes"):
        pytest.skip("it imports nothing of its own")
    result = subprocess.run(
        [sys.executable, "-c", code, "generate", str(MODEL), "-p", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_python_m_ortkv_is_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "ortkv", "--version"], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0
    assert result.stdout.startswith("ortkv ")


def test_a_warning_is_one_line(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    result = ortkv("generate", folder, "-p", "x", "-n", 1)
    assert result.returncode == 0
    assert result.stderr.startswith("warning: generation_config.json sets num_beams")
    assert result.stderr.count("\n") == 1


def test_a_broken_tokenizer_is_named_with_its_reason(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (folder / "tokenizer.json").write_text('{"a":')
    fails(ortkv("generate", folder, "-p", "x"), "tokenizer.json cannot be read")


def test_threads_out_of_range() -> None:
    fails(ortkv("generate", MODEL, "-p", "x", "--threads", 100000), "threads", "256")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = ortkv("inspect", tmp_path, "--debug")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    command = f"{sys.executable} -c '{START}' inspect {MODEL} --json | head -c 1"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "{"
    assert result.stderr == ""


@pytest.mark.parametrize("graph", sorted(FIXTURES.glob("*/*model*.onnx")))
def test_inspect_json_matches_its_schema(graph: Path) -> None:
    result = ortkv("inspect", graph, "--json")
    if graph.name == "decoder_model.onnx":
        fails(result, "no key/value cache goes in")
        return
    if graph.name == "encoder_model.onnx":
        fails(result, "inputs: input_")
        return
    assert result.returncode == 0
    assert result.stderr == ""
    contract = json.loads((ROOT / "docs" / "inspect.schema.json").read_text())
    jsonschema.validate(json.loads(result.stdout), contract)


def test_inspect_prints_a_table() -> None:
    result = ortkv("inspect", MODEL)
    assert result.returncode == 0
    for word in ("past_key_values.0.key", "present.0.key", "BHSD", "in_place", "topology"):
        assert word in result.stdout


def test_inspect_explains_each_entry() -> None:
    result = ortkv("inspect", FIXTURES / "gpt2-merged", "--explain")
    assert result.returncode == 0
    for words in (
        "past_key_values.0.key -> Concat (/transformer/h.0/attn/Concat_3) -> present.0.key",
        "its product goes into the softmax (MatMul /transformer/h.0/attn/MatMul)",
        "axis 2 is S, past_sequence_length: Concat adds the new tokens along it",
    ):
        assert words in result.stdout
    result = ortkv("inspect", FIXTURES / "gpt2-merged", "--explain", "--json")
    document = json.loads(result.stdout)
    contract = json.loads((ROOT / "docs" / "inspect.schema.json").read_text())
    jsonschema.validate(document, contract)
    first = document["explain"][0]
    assert first["past"] == document["entries"][0]["past"]
    assert first["path"] == [{"op": "Concat", "node": "/transformer/h.0/attn/Concat_3"}]
    assert "explain" not in json.loads(ortkv("inspect", FIXTURES / "gpt2-merged", "--json").stdout)


def case(folder: Path, name: str) -> Path:
    onnx.save(decoder(CASES[name]), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("window/window-BHSD", ["window", "the last 4 tokens"]),
        ("scatter/ScatterND-capacity-12", ["scatter", "at most 12 tokens"]),
        ("other/hybrid-CA", ["conv", "BXX", "a state of 8 x 2", "states of 8 x 2 float32"]),
        ("other/cross-given", ["cross_key", "constant", "the encoder's source"]),
        ("mask/4d_drop-concat", ["attention_mask (mask_4d, drop)"]),
        ("mask/4d_add-concat", ["attention_mask (mask_4d, additive)"]),
        ("layout/(BH)SD-concat", ["(BH)SD"]),
    ],
)
def test_inspect_shows_what_is_special(name: str, words: list[str], tmp_path: Path) -> None:
    result = ortkv("inspect", case(tmp_path, name))
    assert result.returncode == 0, result.stderr
    for word in words:
        assert word in result.stdout


def test_inspect_marks_what_is_fed_by_default_and_what_is_stated(tmp_path: Path) -> None:
    path = case(tmp_path, "input/unknown")
    model = onnx.load(path)
    unused = onnx.helper.make_tensor_value_info("[lora]", onnx.TensorProto.FLOAT, [1])
    model.graph.input.append(unused)
    onnx.save(model, path)
    result = ortkv("inspect", path)
    fails(result, '{"kv_map": {"inputs": {"values": {"residual_scale": 1.0}}}}')
    (tmp_path / "map.json").write_text('{"inputs": {"values": {"residual_scale": 1}}}')
    result = ortkv("inspect", path, "--kv-map", tmp_path / "map.json")
    assert "[lora] (fed zeros: the graph does not use it)" in result.stdout
    assert "residual_scale (fed 1, as stated)" in result.stdout


def test_every_command_takes_a_map(tmp_path: Path) -> None:
    """The one given is read: one that is no map fails by its name, and a right one runs."""
    path, given, wrong = (
        case(tmp_path, "input/unknown"),
        tmp_path / "map.json",
        tmp_path / "no.json",
    )
    given.write_text('{"kv_map": {"inputs": {"values": {"residual_scale": 1}}}}')
    wrong.write_text('{"inputs": {"values": {"residual_scale": "one"}}}')
    for command in (
        ["inspect", path, "--json"],
        ["verify", path, "--json"],
        ["bench", path, "--json", "--prompt-len", 4, "--new-tokens", 2, "--repeats", 1],
    ):
        fails(ortkv(*command, "--kv-map", wrong), "no.json: inputs.values.residual_scale")
        result = ortkv(*command, "--kv-map", given)
        assert result.returncode == 0, result
        json.loads(result.stdout)
    fails(ortkv("generate", path, "-p", "x", "--kv-map", wrong), "no.json: inputs.values")
    fails(ortkv("generate", path, "-p", "x", "--kv-map", given), "tokenizer")
    fails(ortkv("chat", path, "--kv-map", wrong), "no.json: inputs.values")
    fails(ortkv("chat", path, "--kv-map", given), "tokenizer")
    result = ortkv("doctor", path, "--json", "--kv-map", wrong)
    assert "no.json" in result.stdout
    result = ortkv("doctor", path, "--json", "--kv-map", given)
    assert "residual_scale" not in result.stdout, result
    assert result.stderr == ""


def test_bench_gives_numbers() -> None:
    result = ortkv("bench", MODEL, "--prompt-len", 16, "--new-tokens", 8, "--repeats", 2, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    (measured,) = document["results"]
    for key in ("prefill_tokens_per_s", "decode_tokens_per_s", "time_to_first_token_ms"):
        assert measured[key] > 0
    assert (
        0 < measured["python_step_us"] < 1e3 * measured["decode_step_ms"] * measured["new_tokens"]
    )
    assert measured["peak_rss_bytes"] > (MODEL / "model.onnx").stat().st_size
    assert ortkv("bench", MODEL, "--prompt-len", 9, "--new-tokens", 4).returncode == 0


def test_bench_refuses_what_does_not_fit() -> None:
    fails(ortkv("bench", MODEL, "--prompt-len", 500, "--new-tokens", 64), "context of 512")
    fails(ortkv("bench", MODEL, "--repeats", 0), "at least 1 repeat")
    fails(ortkv("bench", MODEL, "--batch", 10_000_000), "smaller batch")


def test_chat_keeps_a_conversation(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    template = (
        "{% for m in messages %}{{ m.role | upper }}:\n{{ m.content }}\n\n{% endfor %}ROMEO:\n"
    )
    (folder / "chat_template.jinja").write_text(template)
    talk = ("chat", folder, "-n", 12, "--stop", "\\n\\n")
    both = ortkv(*talk, stdin="Good morrow.\nWhither?\n")
    assert both.returncode == 0, both.stderr
    first = ortkv(*talk, stdin="Good morrow.\n/exit\nWhither?\n")
    assert both.stdout.startswith(first.stdout)
    assert len(both.stdout) > len(first.stdout)
    again = ortkv(*talk, stdin="Whither?\n/reset\nGood morrow.\n")
    assert again.stdout.endswith(first.stdout)


def test_chat_without_a_template_says_so_at_once() -> None:
    fails(ortkv("chat", MODEL), "no chat template")
    fails(ortkv("chat", FIXTURES / "llama-optimum"), "tokenizer")


def test_chat_outlives_a_line_that_does_not_fit(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    talk = f"{'word ' * 2000}\n/nope\nGood morrow.\n"
    result = ortkv("chat", folder, "-n", 8, stdin=talk)
    assert result.returncode == 0
    assert "context of 512" in result.stderr
    assert "/nope is no command" in result.stderr
    assert result.stdout.strip()


def test_generate_and_chat_take_the_same_settings() -> None:
    import dataclasses

    from ortkv.generation_config import GenerationConfig

    shown = [ortkv(command, "--help").stdout for command in ("generate", "chat")]
    names = {"--" + f.name.replace("_", "-") for f in dataclasses.fields(GenerationConfig)}
    found = [{word.rstrip(",") for word in text.split()} & {*names, "--stop"} for text in shown]
    assert found[0] == found[1]
    assert found[0] >= {"--max-new-tokens", "--temperature", "--top-k", "--top-p", "--stop"}


def test_help_imports_neither_onnxruntime_nor_numpy() -> None:
    """What keeps `ortkv --help` quick, checked without a clock."""
    code = (
        "import sys\n"
        "from ortkv.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'rich', 'numpy', 'onnx', 'onnxruntime', 'tokenizers', 'transformers', 'torch'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_running_a_model_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, ortkv\n"
        f"ortkv.Generator({str(MODEL)!r}).generate('ROMEO:', max_new_tokens=2)\n"
        "sys.exit(', '.join({'torch', 'transformers'} & set(sys.modules)) or 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_without_an_onnxruntime_one_line_says_what_to_install() -> None:
    code = f"import sys; sys.modules['onnxruntime'] = None; {START}"
    result = subprocess.run(
        [sys.executable, "-c", code, "generate", str(MODEL), "-p", "x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    fails(result, "ortkv[cpu]", "ortkv[gpu]")
