"""The only door to onnxruntime: providers, threads, telemetry, sessions, device memory.

onnxruntime ships no types; the protocols here say what the other rooms use of it.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from ortkv.errors import (
    ExecutionFailed,
    InvalidRequest,
    ModelFileError,
    OutOfMemory,
    ProviderUnavailable,
    RuntimeMissing,
    UnsupportedModel,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

MAX_THREADS = 256
TELEMETRY_SWITCH = "ORT_DISABLE_TELEMETRY"

Provider = str | list[str | tuple[str, dict[str, Any]]]
"""'cpu', 'cuda', 'cuda:1', 'auto', or onnxruntime's own list of providers."""

_CUDA = "CUDAExecutionProvider"
_CPU = "CPUExecutionProvider"


class IoBinding(Protocol):
    """What ortkv uses of ``onnxruntime.IOBinding``."""

    def bind_cpu_input(self, name: str, arr_on_cpu: NDArray[Any]) -> None: ...
    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: int,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None: ...
    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: int | None = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None: ...
    def get_outputs(self) -> list[OrtValue]: ...


class OrtValue(Protocol):
    """What ortkv uses of ``onnxruntime.OrtValue``."""

    def data_ptr(self) -> int: ...
    def numpy(self) -> NDArray[Any]: ...
    def update_inplace(self, np_arr: NDArray[Any]) -> None: ...


class Session(Protocol):
    """What ortkv uses of ``onnxruntime.InferenceSession``."""

    def io_binding(self) -> IoBinding: ...
    def run_with_iobinding(self, iobinding: IoBinding) -> None: ...
    def get_providers(self) -> list[str]: ...


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where the cache lives. ``kind`` is onnxruntime's name for it."""

    kind: str
    index: int = 0


CPU = Device(kind="cpu")


class Buffer:
    """Flat, zeroed bytes on a device, alive as long as this object is.

    onnxruntime is handed the address alone: whoever binds it keeps the Buffer. (A host array
    of ``read`` keeps the bytes alive by itself; an OrtValue's ``numpy()`` would not.)
    """

    def __init__(self, num_bytes: int, device: Device) -> None:
        self.num_bytes = num_bytes
        self.device = device
        self._host, self._value = _allocate(num_bytes, device)
        self.address = self._value.data_ptr()

    @contextmanager
    def edit(self) -> Generator[NDArray[np.uint8]]:
        """The bytes as a host array whose changes last: a view on the CPU, else a round trip."""
        array = self.read()
        yield array
        if self._host is None:
            self._value.update_inplace(array)

    @contextmanager
    def overwrite(self) -> Generator[NDArray[np.uint8]]:
        """As ``edit`` for a buffer just made, or one written whole: nothing is read back.

        Bytes that are not written keep what they had on the CPU, and become zero elsewhere.
        """
        array = np.zeros(max(self.num_bytes, 1), np.uint8) if self._host is None else self._host
        yield array
        if self._host is None:
            self._value.update_inplace(array)

    def read(self) -> NDArray[np.uint8]:
        """The bytes on the host. Aliases: on the CPU, the buffer itself; do not write."""
        return self._value.numpy() if self._host is None else self._host


def _allocate(num_bytes: int, device: Device) -> tuple[NDArray[np.uint8] | None, OrtValue]:
    """Zeros as an OrtValue, and its host array where the memory is the host's.

    One byte at least, so that an empty tensor has an address too.
    """
    ort = import_onnxruntime()
    try:
        zeros = np.zeros(max(num_bytes, 1), dtype=np.uint8)
        value: OrtValue = ort.OrtValue.ortvalue_from_numpy(zeros, device.kind, device.index)
    except Exception as error:
        # numpy's ValueError: more bytes than any array may have.
        if not (_is_out_of_memory(error) or isinstance(error, ValueError)):
            raise
        raise OutOfMemory(
            f"{num_bytes / 2**20:.0f} MiB for the cache could not be allocated on {device.kind}: "
            "use a shorter prompt, fewer rows at once, or a smaller max_new_tokens."
        ) from error
    return zeros if device == CPU else None, value


def import_onnxruntime() -> Any:
    """onnxruntime, its telemetry off unless the user chose otherwise.

    Raises: RuntimeMissing where no build of it is installed.
    """
    chosen = os.environ.get(TELEMETRY_SWITCH)
    try:
        ort: Any = import_module("onnxruntime")
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            raise RuntimeMissing(
                f"onnxruntime is installed but cannot be imported ({error}): install it again."
            ) from error
        raise RuntimeMissing(
            "onnxruntime is not installed: pip install 'ortkv[cpu]', or 'ortkv[gpu]' for CUDA."
        ) from error
    if chosen in (None, "1"):
        ort.disable_telemetry_events()
    return ort


def available_cores() -> int:
    """Cores this process may use: its affinity, and its cgroup's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _cgroup_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores or 1, quota or cores or 1))


def _cgroup_quota(cpu_max: Path) -> int | None:
    """Whole cores of a cgroup v2 quota ("QUOTA PERIOD" in microseconds, or "max PERIOD")."""
    try:
        quota, period = cpu_max.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A session and the device its cache belongs on."""

    session: Session
    device: Device


def open_model(path: Path, *, provider: Provider = "cpu", threads: int | None = None) -> OpenModel:
    """Load a graph with its weights.

    ``provider``: 'auto' takes CUDA where it starts, else the CPU with a warning that says why.
    ``threads``: intra-op threads; None takes every core the process may use.

    Raises: ProviderUnavailable, ModelFileError, UnsupportedModel (an op, opset or dtype
    that this onnxruntime has no kernel for), OutOfMemory.
    """
    ort = import_onnxruntime()
    if threads is not None and (type(threads) is not int or not 1 <= threads <= MAX_THREADS):
        raise InvalidRequest(f"threads is {threads!r}: expected 1 to {MAX_THREADS}, or None.")
    threads = threads or available_cores()
    if provider != "auto":
        return _open(ort, path, provider, threads)
    if _CUDA in ort.get_available_providers():
        try:
            return _open(ort, path, "cuda", threads)
        except ProviderUnavailable as error:
            warnings.warn(f"provider 'auto' takes the CPU: {error}", stacklevel=2)
    return _open(ort, path, "cpu", threads)


def _open(ort: Any, path: Path, provider: Provider, threads: int) -> OpenModel:
    wanted, device = _providers(ort, provider)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = _create(ort, path, options, wanted)
    first, _ = _name_and_options(wanted[0])
    taken = session.get_providers()
    if first not in taken:
        raise _not_started(first, f"it took {', '.join(taken)}")
    return OpenModel(session=session, device=device)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of an op on a provider.

    ``versions``: of the op's definition, first and last; ``types``: what each of the op's type
    parameters may be ("T" -> ("tensor(float)",)).
    """

    provider: str
    domain: str
    op: str
    versions: tuple[int, int]
    types: dict[str, tuple[str, ...]]


def provider_names(provider: Provider) -> tuple[str, ...]:
    """The providers a session would use, in order of preference, for what the user asked.

    Raises: ProviderUnavailable, RuntimeMissing.
    """
    wanted, _ = _providers(import_onnxruntime(), provider)
    names = [entry if isinstance(entry, str) else entry[0] for entry in wanted]
    return tuple(dict.fromkeys([*names, "CPUExecutionProvider"]))


def kernels() -> tuple[Kernel, ...] | None:
    """Every kernel of the installed providers; None where this onnxruntime does not list them."""
    state = import_onnxruntime().capi.onnxruntime_pybind11_state
    try:
        found: list[Any] = state.get_all_opkernel_def()
    except (AttributeError, RuntimeError):  # a build without it, or a provider that cannot start
        return None
    return tuple(
        Kernel(
            provider=kernel.provider,
            domain=kernel.domain,
            op=kernel.op_name,
            versions=tuple(kernel.version_range),
            types={name: tuple(types) for name, types in kernel.type_constraints.items()},
        )
        for kernel in found
    )


def accepts(model: bytes) -> bool:
    """Whether this onnxruntime makes a session, on the CPU, of a small serialized model."""
    ort = import_onnxruntime()
    state = ort.capi.onnxruntime_pybind11_state
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model, sess_options=options, providers=["CPUExecutionProvider"])
    except (state.InvalidGraph, state.NotImplemented, state.Fail):
        return False
    return True


def run(session: Session, binding: IoBinding) -> None:
    """Run what is bound.   Raises: OutOfMemory; ExecutionFailed with onnxruntime's own reason."""
    try:
        session.run_with_iobinding(binding)
    except (RuntimeError, MemoryError) as error:
        if _is_out_of_memory(error):
            raise OutOfMemory(
                f"a run needs more memory than there is: {_first_line(error)}. Use a shorter "
                "prompt or fewer rows at once."
            ) from error
        raise ExecutionFailed(
            f"onnxruntime failed in a run: {_first_line(error)}. Check that the tokens fit the "
            "model's context, and the model itself with `ortkv verify`."
        ) from error


_NO_MEMORY = ("failed to allocate", "out of memory", "bad_alloc", "bad allocation", "alloc_failed")


def _is_out_of_memory(error: Exception) -> bool:
    """onnxruntime has no class for it: its arena, CUDA, C++ and cuBLAS each say it in words."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(words in said for words in _NO_MEMORY)


def _create(ort: Any, path: Path, options: Any, providers: list[Any]) -> Session:
    """A session that has the providers asked for or fails: onnxruntime's own fallback prints.

    Options of the session that the model's file itself states are not read.
    """
    state = ort.capi.onnxruntime_pybind11_state
    try:
        return ort.InferenceSession(
            str(path),
            sess_options=options,
            providers=providers,
            enable_fallback=0,
            read_config_from_model=0,
        )
    except (state.InvalidProtobuf, state.NoSuchFile) as error:
        raise ModelFileError(f"{path}: {_first_line(error)}. Copy or export it again.") from error
    except (state.InvalidGraph, state.NotImplemented) as error:
        raise _unsupported(ort, path, error) from error
    except Exception as error:  # of many classes, with no base that only onnxruntime's have
        if _is_out_of_memory(error):
            raise OutOfMemory(
                f"the weights of {path} do not fit in memory: {_first_line(error)}. Export it in a "
                "smaller precision, or use a larger machine."
            ) from error
        culprit = _provider_at_fault(error, providers)
        if culprit is not None:
            raise _not_started(culprit, _first_line(error)) from error
        raise _unsupported(ort, path, error) from error


def _provider_at_fault(error: Exception, providers: list[Any]) -> str | None:
    """The provider that failed to start; None where the graph is at fault, or the CPU's kernels.

    onnxruntime's Fail is for both: a provider's own failure names it.
    """
    names = [_name_and_options(entry)[0] for entry in providers]
    others = [name for name in names if name != _CPU]
    if type(error).__name__ != "Fail":
        return next(iter(others), None)
    said = str(error).lower()
    return next((n for n in others if n.removesuffix("ExecutionProvider").lower() in said), None)


def _not_started(provider: str, reason: str) -> ProviderUnavailable:
    return ProviderUnavailable(
        f"onnxruntime has {provider} but could not start it on this machine ({reason}): its "
        "libraries or its device are missing, or its options are wrong. For CUDA: pip install "
        "'ortkv[gpu]', and check nvidia-smi."
    )


_TOO_NEW = {
    "opset": re.compile(r"Opset (\d+) is under development.* till opset (\d+)", re.DOTALL),
    "IR version": re.compile(r"model IR version: (\d+), max supported IR version: (\d+)"),
}
_UNKNOWN_OP = re.compile(r"(\S+:\w+)\(-?\d+\) is not a registered function/op")


def _unsupported(ort: Any, path: Path, error: Exception) -> UnsupportedModel:
    """What onnxruntime lacks for this graph, in fewer words than its own."""
    for what, form in _TOO_NEW.items():
        found = form.search(str(error))
        if found:
            return UnsupportedModel(
                f"{path} needs {what} {found[1]}, this onnxruntime ({ort.__version__}) has "
                f"{found[2]}: upgrade onnxruntime, or export for an older {what}."
            )
    unknown = _UNKNOWN_OP.search(str(error))
    if unknown:
        return UnsupportedModel(
            f"{path} needs the operator {unknown[1]}, which this onnxruntime ({ort.__version__}) "
            "does not have: export with standard operators. ortkv loads no library of operators "
            "that comes with a model."
        )
    return UnsupportedModel(
        f"{path}: onnxruntime {ort.__version__} cannot run this graph: {_first_line(error)}. "
        "Upgrade onnxruntime, or export for an older opset."
    )


def _first_line(error: Exception) -> str:
    said = str(error).strip() or type(error).__name__
    return said.splitlines()[0].rstrip(".")


def _providers(ort: Any, provider: Provider) -> tuple[list[Any], Device]:
    """onnxruntime's provider list for what the user asked, and the cache's device."""
    available: list[str] = ort.get_available_providers()
    if isinstance(provider, str) and provider in available:
        provider = [provider]
    elif not isinstance(provider, list):
        provider = _list_of(provider, available)
    wanted = _check_available(provider, available)
    if any(_name_and_options(entry)[0] == _CUDA for entry in wanted):
        with redirect_stdout(StringIO()):  # it prints what is missing; starting CUDA says so too
            ort.preload_dlls()
    return wanted, _device_of(wanted)


def _list_of(provider: object, available: list[str]) -> list[Any]:
    """onnxruntime's list for one of ortkv's own names."""
    kind, _, index = str(provider).lower().partition(":")
    if kind == "cpu" and not index:
        return [_CPU]
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ProviderUnavailable(
            f"provider {provider!r} is not one of cpu, cuda, cuda:N, auto, nor one that this "
            f"onnxruntime has: {', '.join(available)}. Name one of these."
        )
    return [(_CUDA, {"device_id": str(int(index or "0"))}), _CPU]


def _check_available(wanted: list[Any], available: list[str]) -> list[Any]:
    names = [_name_and_options(entry)[0] for entry in wanted]
    missing = [name for name in names if name not in available]
    if missing or not names:
        line = "pip install 'ortkv[gpu]'" if _CUDA in missing else "install it"
        raise ProviderUnavailable(
            f"{', '.join(missing) or 'no provider'} is not in this onnxruntime, which "
            f"has {', '.join(available)}: {line} (in an environment without the CPU-only "
            "onnxruntime), or use provider 'cpu'."
        )
    return wanted


def _name_and_options(entry: object) -> tuple[str, dict[str, Any]]:
    """An entry of onnxruntime's provider list taken apart."""
    if isinstance(entry, str):
        return entry, {}
    pair = cast("tuple[Any, ...]", entry) if isinstance(entry, tuple) else ()
    if len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], dict):
        return pair[0], cast("dict[str, Any]", pair[1])
    raise InvalidRequest(
        f"found {entry!r} in the list of providers: expected the name of a provider, or a tuple "
        "of its name and a dict of its options."
    )


def _device_of(providers: list[Any]) -> Device:
    """CUDA's memory for a list that starts with CUDA; host memory for every other."""
    name, options = _name_and_options(providers[0])
    if name != _CUDA:
        return CPU
    index = str(options.get("device_id", 0))
    if not index.isdecimal():
        raise InvalidRequest(
            f"device_id of {_CUDA} is {index!r}: expected the number of a device, such as 0."
        )
    return Device(kind="cuda", index=int(index))
