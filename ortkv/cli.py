"""The ``ortkv`` command: arguments in, text and tables out; every error is one line."""

from __future__ import annotations

import functools
import inspect as introspection
import os
import sys
import time
import warnings
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortkv.errors import InvalidRequest, OrtkvError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console

    from ortkv.schema import CacheEntry, CacheSchema, HelperInput
    from ortkv.schema.explain import Explanation
    from ortkv.verification import VerifyReport

app = typer.Typer(
    name="ortkv",
    help="Run any autoregressive ONNX decoder on ONNX Runtime.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help costs 150 ms at every start
    context_settings={"auto_envvar_prefix": "ORTKV", "help_option_names": ["-h", "--help"]},
    epilog="An option but --stop can be set as ORTKV_COMMAND_OPTION: ORTKV_GENERATE_SEED=1.",
)

_option = functools.partial(typer.Option, show_envvar=False)

Model = Annotated[str, typer.Argument(metavar="PATH", help="Model folder, .onnx file, or hub id.")]
ProviderName = Annotated[
    str, _option("--provider", help="Execution provider: cpu, cuda, cuda:N, auto.")
]
Threads = Annotated[
    int | None, _option("--threads", min=1, help="Threads; default: every core allowed.")
]
Precision = Annotated[
    str | None,
    _option("--precision", help="Which of a folder's graphs: q4 for model_q4.onnx, and so on."),
]
Seed = Annotated[int | None, _option(help="Seed of the random numbers that --do-sample draws.")]
Json = Annotated[bool, _option("--json", help="One JSON document on stdout.")]
KvMapFile = Annotated[
    str | None,
    _option(
        "--kv-map",
        metavar="FILE",
        help="JSON that says what cannot be derived of the cache; default: in ortkv.json.",
    ),
]
Debug = Annotated[bool, _option("--debug", help="Show the traceback of an error.")]


def _reported(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose failure is one line on stderr and exit code 1."""

    @functools.wraps(command)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        try:
            command(*args, debug=debug, **kwargs)
        except OrtkvError as error:
            _fail(f"{error}", debug=debug)
        except BrokenPipeError:
            # The reader left (head, less): point stdout nowhere, so that exit does not flush to it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (typer.Exit, typer.Abort, typer.BadParameter, KeyboardInterrupt):
            raise
        except OSError as error:
            _fail(f"the output cannot be written: {error.strerror or error}.", debug=debug)
        except MemoryError:
            _fail("memory ran out: use a shorter prompt or a smaller model.", debug=debug)
        except Exception as error:  # noqa: BLE001 - the last door: no traceback reaches a user
            _fail(f"a defect in ortkv or below, {type(error).__name__}: {error}", debug=debug)

    return run


def _fail(message: str, *, debug: bool) -> None:
    if debug:
        raise
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    raise typer.Exit(1)


def _settings(  # noqa: PLR0913 - one argument an option
    *,
    max_new_tokens: Annotated[
        int | None, _option("--max-new-tokens", "-n", help="Stop after this many tokens.")
    ] = None,
    do_sample: Annotated[
        bool | None, _option("--do-sample/--greedy", help="Draw tokens, or take the likeliest.")
    ] = None,
    temperature: Annotated[
        float | None, _option(help="Implies --do-sample; 0 means --greedy.")
    ] = None,
    top_k: Annotated[
        int | None, _option(help="Draw from the k likeliest; 0 for all. Implies --do-sample.")
    ] = None,
    top_p: Annotated[
        float | None,
        _option(help="Draw from the likeliest that hold this mass. Implies --do-sample."),
    ] = None,
    min_p: Annotated[
        float | None,
        _option(
            help="Draw from tokens at least this fraction as likely as the best. Implies "
            "--do-sample."
        ),
    ] = None,
    repetition_penalty: Annotated[float | None, _option(help="Above 1: repeat less.")] = None,
    stop: Annotated[
        list[str] | None,
        _option(
            "--stop", help="End before this text (\\n, \\t); repeatable.", allow_from_autoenv=False
        ),
    ] = None,
    seed: Seed = None,
) -> dict[str, Any]:
    """The settings that were given; a sampling option without --greedy means --do-sample."""
    if do_sample is None and temperature == 0:
        do_sample, temperature = False, None
    if do_sample is None and (temperature, top_k, top_p, min_p) != (None,) * 4:
        do_sample = True
    stops = tuple(s.replace("\\n", "\n").replace("\\t", "\t") for s in stop or ())
    given: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop_strings": stops or None,
        "seed": seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def _takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of ``_settings`` in the place of its argument ``settings``."""
    own = introspection.signature(command, eval_str=True)  # typer takes it as it is
    options = introspection.signature(_settings, eval_str=True).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in options}
        command(**given, settings=_settings(**chosen))

    parameters: list[introspection.Parameter] = []
    for parameter in own.parameters.values():
        parameters += options.values() if parameter.name == "settings" else [parameter]
    run.__annotations__ = {**command.__annotations__, **_settings.__annotations__}
    setattr(run, "__signature__", own.replace(parameters=parameters))  # noqa: B010 - untyped
    return run


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, _option("--version", help="Print the version.", allow_from_autoenv=False)
    ] = False,
) -> None:
    if version:
        from ortkv import __version__

        typer.echo(f"ortkv {__version__}")
        raise typer.Exit


@app.command()
@_reported
@_takes_settings
def generate(  # noqa: PLR0913
    path: Model,
    prompt: Annotated[
        str | None, _option("--prompt", "-p", help="Text to continue; default: stdin.")
    ] = None,
    *,
    settings: dict[str, Any],
    echo: Annotated[bool, _option("--echo", help="Print the prompt too.")] = False,
    stats: Annotated[bool, _option("--stats", help="Timings on stderr at the end.")] = False,
    provider: ProviderName = "cpu",
    precision: Precision = None,
    threads: Threads = None,
    kv_map: KvMapFile = None,
    debug: Debug = False,
) -> None:
    """Continue a prompt; text streams to stdout."""
    del debug
    from ortkv.generator import Generator

    text = _text_on_stdin() if prompt is None else prompt
    generator = Generator(
        path, provider=provider, threads=threads, precision=precision, kv_map=kv_map
    )
    _say_provider(provider, generator.provider)
    start = time.perf_counter()
    sequence = generator.start(text)
    prefill_s = time.perf_counter() - start
    num_prompt = len(sequence.tokens)
    if echo:
        sys.stdout.write(text)
    _print_pieces(sequence.stream(**settings))
    if stats:
        decode_s = time.perf_counter() - start - prefill_s
        num_new = len(sequence.tokens) - num_prompt
        sys.stderr.write(
            f"prompt {num_prompt} tokens in {1e3 * prefill_s:.0f} ms; {num_new} new tokens, "
            f"{num_new / max(decode_s, 1e-9):.0f} a second; ended by {sequence.finish_reason}\n"
        )


@app.command()
@_reported
@_takes_settings
def chat(  # noqa: PLR0913
    path: Model,
    system: Annotated[str | None, _option(help="System message.")] = None,
    *,
    settings: dict[str, Any],
    provider: ProviderName = "cpu",
    precision: Precision = None,
    threads: Threads = None,
    kv_map: KvMapFile = None,
    debug: Debug = False,
) -> None:
    """Talk with a model that has a chat template. /reset starts over, /exit or Ctrl-D ends."""
    del debug
    from ortkv.generator import Generator

    generator = Generator(
        path, provider=provider, threads=threads, precision=precision, kv_map=kv_map
    )
    generator.defaults.updated(**settings)
    opening = [{"role": "system", "content": system}] if system else []
    generator.text.encode_chat([*opening, {"role": "user", "content": "Hello"}])
    _say_provider(provider, generator.provider)
    messages, sequence = list(opening), None
    for line in _lines_of_user():
        if line == "/reset":
            messages, sequence = list(opening), None
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            ids = generator.text.encode_chat(asked)
            sequence = generator.start(ids) if sequence is None else sequence.become(ids)
            reply = _print_pieces(sequence.stream(**settings))
        except InvalidRequest as error:
            sys.stderr.write(f"error: {error} /reset starts a new conversation.\n")
            continue
        messages = [*asked, {"role": "assistant", "content": reply}]


@app.command()
@_reported
def inspect(
    path: Model,
    explain: Annotated[
        bool, _option("--explain", help="Show what in the graph is behind each entry.")
    ] = False,
    precision: Precision = None,
    kv_map: KvMapFile = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how a graph's cache goes in and out, with the evidence for each entry."""
    del debug
    from ortkv.loading import inspect as read_schema
    from ortkv.loading import inspect_explained

    if not explain:
        schema, explanations = read_schema(path, precision=precision, kv_map=kv_map), []
    else:
        schema, explanations = inspect_explained(path, precision=precision, kv_map=kv_map)
    if json:
        shown = {"explain": [e.to_dict() for e in explanations]} if explain else {}
        _print_json(schema.to_dict() | shown)
    else:
        _print_schema(schema)
        if explain:
            _print_explanations(schema, explanations)


@app.command()
@_reported
def verify(  # noqa: PLR0913
    path: Model,
    provider: ProviderName = "cpu",
    precision: Precision = None,
    threads: Threads = None,
    seed: Annotated[int, _option(help="Seed of the random tokens it is run on.", min=0)] = 0,
    kv_map: KvMapFile = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove that the cache is understood: steps, chunks, rewind, ragged rows, against full runs."""
    del debug
    from ortkv.verification import verify as prove

    report = prove(
        path,
        provider=provider,
        threads=threads,
        precision=precision,
        seed=seed,
        kv_map=kv_map,
    )
    if json:
        _print_json(report.to_dict())
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
@_reported
def bench(  # noqa: PLR0913
    path: Model,
    providers: Annotated[
        str, _option(help="Execution providers to measure, comma-separated.")
    ] = "cpu",
    prompt_len: Annotated[int, _option(help="Prompt tokens a row.")] = 128,
    new_tokens: Annotated[int, _option(help="Tokens to generate a row.")] = 64,
    batch: Annotated[int, _option(help="Rows at once.")] = 1,
    repeats: Annotated[int, _option(help="Measured passes, after one to warm up.")] = 5,
    threads: Threads = None,
    kv_map: KvMapFile = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure prefill, first token, decode and memory; medians over the repeats."""
    del debug
    from ortkv import bench as benchmarks

    workload = benchmarks.Workload(
        prompt_len=prompt_len, new_tokens=new_tokens, batch=batch, repeats=repeats
    )
    document = benchmarks.bench(
        path, providers=providers.split(","), threads=threads, kv_map=kv_map, workload=workload
    )
    if json:
        _print_json(document)
    else:
        _print_bench(document)


@app.command()
@_reported
def doctor(
    path: Model,
    provider: ProviderName = "cpu",
    kv_map: KvMapFile = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find what will bite when a model is run, and say what to do. Exit code 1 for an error."""
    del debug
    from ortkv.doctor import diagnose, document, print_findings

    findings = diagnose(path, provider=provider, kv_map=kv_map)
    if json:
        _print_json(document(findings))
    else:
        print_findings(findings)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line.

    Output that the terminal's encoding has no letters for is shown with replacements.
    """
    out: object = sys.stdout
    if isinstance(out, TextIOWrapper):
        out.reconfigure(errors="replace")
    warnings.formatwarning = _warning_line
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


def _warning_line(message: object, *_: object) -> str:
    return f"warning: {' '.join(str(message).split())}\n"


def _say_provider(asked: str, taken: str) -> None:
    if asked == "auto":
        sys.stderr.write(f"provider: {taken}\n")


def _print_pieces(pieces: Iterator[str]) -> str:
    """Write pieces as they come, then a newline. Returns: all of them."""
    whole = ""
    for piece in pieces:
        whole += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return whole


def _text_on_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise typer.BadParameter("expected text to continue: -p TEXT, or text on stdin")
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"stdin is not UTF-8 (byte {raw[error.start]:#x} at {error.start}): convert it first."
        ) from error


def _lines_of_user() -> Iterator[str]:
    """What the user types, commands to the chat itself included."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line.startswith("/") and line != "/reset":
            sys.stderr.write(f"{line} is no command here: /reset starts over, /exit ends.\n")
        elif line:
            yield line


def _print_json(document: dict[str, Any]) -> None:
    import json

    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _wide_console() -> Console:
    """Piped, a name must stay on its line, to be found by grep."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 10_000
    return Console(width=width, highlight=False, markup=False)


def _print_schema(schema: CacheSchema) -> None:
    from rich.table import Table
    from rich.text import Text

    evidence = {", ".join(e.evidence): None for e in schema.entries}
    columns = {
        "layer": [str(e.layer) for e in schema.entries],
        "role": [e.role for e in schema.entries],
        "past": [e.past or "" for e in schema.entries],
        "present": [e.present or "" for e in schema.entries],
        "layout": [e.layout for e in schema.entries],
        "update": [e.update for e in schema.entries],
        "holds": [_held(e) for e in schema.entries],
        "evidence": [", ".join(e.evidence) for e in schema.entries],
    }
    if not any(columns["holds"]):
        del columns["holds"]
    if len(evidence) == 1:
        del columns["evidence"]
    table = Table(*columns, box=None, pad_edge=False)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    console = _wide_console()
    console.print(table)
    if len(evidence) == 1:
        console.print(f"\nevidence {', '.join(evidence)}, for every entry")
    console.print(f"tokens   {schema.tokens} ({schema.tokens_dtype})")
    console.print(f"helpers  {', '.join(map(_helper_text, schema.helpers)) or 'none'}")
    console.print(f"logits   {schema.logits} ({schema.logits_dtype})")
    sizes = {_size_text(e): None for e in schema.entries}
    console.print(
        f"cache    {schema.num_layers} layers, {', '.join(sizes)}, "
        f"{schema.bytes_per_token} bytes a token"
    )


def _held(entry: CacheEntry) -> str:
    """What an entry holds, where that is not every token."""
    if entry.state_dims:
        return f"a state of {' x '.join(map(str, entry.state_dims))}"
    if entry.update == "constant":
        return "the encoder's source"
    if entry.window is not None:
        return f"the last {entry.window} tokens"
    return "" if entry.capacity is None else f"at most {entry.capacity} tokens"


def _size_text(entry: CacheEntry) -> str:
    if entry.state_dims:
        return f"states of {' x '.join(map(str, entry.state_dims))} {entry.dtype}"
    return f"{entry.num_kv_heads} kv heads x {entry.head_dim} {entry.dtype}"


def _helper_text(helper: HelperInput) -> str:
    """An input and how it is computed; a default or a stated value visibly so."""
    told = [str(helper.kind)]
    if helper.kind in ("mask_2d", "mask_4d", "encoder_mask"):
        told.append(helper.values)
    if helper.kind == "zeros" and not helper.is_stated:
        told = ["fed zeros: the graph does not use it"]
    elif helper.kind in ("zeros", "stated"):
        told = [f"fed {helper.fill:g}, as stated"]
    elif helper.is_stated:
        told.append("as stated")
    return f"{helper.name} ({', '.join(told)})"


def _print_explanations(schema: CacheSchema, explanations: Iterable[Explanation]) -> None:
    from rich.text import Text
    from rich.tree import Tree

    console = _wide_console()
    for entry, shown in zip(schema.entries, explanations, strict=True):
        tree = Tree(Text(f"\nlayer {entry.layer} {entry.role}: {', '.join(entry.evidence)}"))
        ops = [f"{step.op} ({step.node})" for step in shown.path]
        ends = [entry.past or "no past", *ops, entry.present or "no present"]
        tree.add(Text(f"path    {' -> '.join(ends)}"))
        if shown.join is not None:
            tree.add(Text(f"joined  {entry.update} by {shown.join.op} ({shown.join.node})"))
        by = f" ({shown.role_from.op} {shown.role_from.node})" if shown.role_from else ""
        tree.add(Text(f"role    {entry.role}: {shown.use}{by}"))
        axes = tree.add(Text(f"layout  {entry.layout}"))
        for axis in shown.axes:
            axes.add(Text(f"axis {axis.axis} is {axis.letters}, {axis.reason}"))
        console.print(tree)


def _print_report(report: VerifyReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from ortkv.verification import by_layer

    table = Table(box=None, pad_edge=False)
    for title in ("check", "largest logit error", "greedy agreement"):
        table.add_column(title)
    for check in report.checks:
        table.add_row(check.name, f"{check.max_abs_error:.2e}", f"{check.greedy_agreement:.0%}")
    worst = max(report.entries, key=lambda entry: entry.max_abs_error)
    console = Console(highlight=False)
    console.print(table)
    for reason in report.skipped:
        console.print(f"not run: {reason}")
    console.print(
        f"\ncache, stepped against at once: at most {worst.max_abs_error:.2e} "
        f"(layer {worst.layer} {worst.role})"
    )
    if not report.ok:
        console.print(by_layer(report), markup=False)
    verdict = "ok" if report.ok else "WRONG: do not trust this model's output"
    console.print(f"{verdict} (tolerance {report.tolerance:.2e})")


_BENCH_ROWS = (
    ("provider", "provider", "{}"),
    ("batch x prompt + new", "shape", "{}"),
    ("load", "load_s", "{:.2f} s"),
    ("time to first token", "time_to_first_token_ms", "{:.1f} ms"),
    ("prefill", "prefill_tokens_per_s", "{:.0f} tokens/s"),
    ("decode", "decode_tokens_per_s", "{:.0f} tokens/s"),
    ("decode step, median", "decode_step_ms", "{:.2f} ms"),
    ("decode step, 90%", "decode_step_p90_ms", "{:.2f} ms"),
    ("of which Python", "python_step_us", "{:.0f} us"),
    ("cache a token", "cache_bytes_per_token", "{} bytes"),
    ("peak memory", "peak_rss_mib", "{:.0f} MiB"),
)


def _print_bench(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    for title, key, form in _BENCH_ROWS:
        values = [_bench_cell(result, key, form) for result in document["results"]]
        table.add_row(title, *values)
    console = Console()
    console.print(table)
    where = document["environment"]
    console.print(
        f"\n{where['processor']}, {where['cores']} cores, onnxruntime {where['onnxruntime']}",
        highlight=False,
    )


def _bench_cell(result: dict[str, Any], key: str, form: str) -> str:
    if key == "shape":
        return f"{result['batch']} x {result['prompt_len']} + {result['new_tokens']}"
    if key == "peak_rss_mib":
        peak = result["peak_rss_bytes"]
        return "not known here" if peak is None else form.format(peak / 2**20)
    return form.format(result[key])
