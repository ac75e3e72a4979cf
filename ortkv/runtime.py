"""The only door to onnxruntime: providers, threads, telemetry, sessions, device memory.

onnxruntime ships no types; the protocols here say what the other rooms use of it.
"""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "lloc" not in str(error):
            raise
        raise OutOfMemory(
            f"{num_bytes / 2**20:.0f} MiB for the cache could not be had on {device.kind}: "
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

    ``threads``: intra-op threads; None takes every core the process may use.

    Raises: ProviderUnavailable, ModelFileError, UnsupportedModel (an op, opset or dtype
    that this onnxruntime has no kernel for).
    """
    ort = import_onnxruntime()
    wanted, device = _providers(ort, provider)
    if threads is not None and (type(threads) is not int or not 1 <= threads <= MAX_THREADS):
        raise InvalidRequest(f"threads is {threads!r}: expected 1 to {MAX_THREADS}, or None.")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or available_cores()
    options.log_severity_level = 4
    first = wanted[0] if isinstance(wanted[0], str) else wanted[0][0]
    session = _create(ort, path, options, wanted)
    if first not in session.get_providers():
        raise ProviderUnavailable(
            f"onnxruntime has {first} but could not start it on this machine (took "
            f"{', '.join(session.get_providers())}): its libraries or its device are missing. "
            "For CUDA: pip install 'ortkv[gpu]', and check nvidia-smi."
        )
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
    """Run what is bound.   Raises: ExecutionFailed with onnxruntime's own reason."""
    try:
        session.run_with_iobinding(binding)
    except RuntimeError as error:
        raise ExecutionFailed(
            f"onnxruntime failed in a run: {_first_line(error)}. Run `ortkv inspect` on the model, "
            "and export it again if its cache is not as the table says."
        ) from error


def _create(ort: Any, path: Path, options: Any, providers: Any) -> Session:
    state = ort.capi.onnxruntime_pybind11_state
    try:
        return ort.InferenceSession(str(path), sess_options=options, providers=providers)
    except (state.InvalidProtobuf, state.NoSuchFile) as error:
        raise ModelFileError(f"{path}: {_first_line(error)}. Copy or export it again.") from error
    except (state.InvalidGraph, state.NotImplemented, state.Fail) as error:
        raise UnsupportedModel(
            f"{path}: onnxruntime {ort.__version__} cannot run this graph: {_first_line(error)}. "
            "Upgrade onnxruntime, or export for an older opset."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _providers(ort: Any, provider: Provider) -> tuple[list[Any], Device]:
    """onnxruntime's provider list for what the user asked, and the cache's device."""
    available: list[str] = ort.get_available_providers()
    if provider == "auto":
        provider = "cuda" if "CUDAExecutionProvider" in available else "cpu"
    if isinstance(provider, str) and provider in available:
        provider = [provider]
    if isinstance(provider, list):
        return _check_available(provider, available), _device_of(provider)
    kind, _, index = str(provider).lower().partition(":")
    if kind == "cpu" and not index:
        return ["CPUExecutionProvider"], CPU
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ProviderUnavailable(
            f"provider {provider!r} is not one of cpu, cuda, cuda:N, auto, nor one that this "
            f"onnxruntime has: {', '.join(available)}. Name one of these."
        )
    device = Device(kind="cuda", index=int(index or "0"))
    wanted = _check_available(
        [("CUDAExecutionProvider", {"device_id": str(device.index)}), "CPUExecutionProvider"],
        available,
    )
    ort.preload_dlls()
    return wanted, device


def _check_available(wanted: list[Any], available: list[str]) -> list[Any]:
    names = [entry if isinstance(entry, str) else entry[0] for entry in wanted]
    missing = [name for name in names if name not in available]
    if missing or not names:
        line = "pip install 'ortkv[gpu]'" if "CUDAExecutionProvider" in missing else "install it"
        raise ProviderUnavailable(
            f"{', '.join(map(str, missing)) or 'no provider'} is not in this onnxruntime, which "
            f"has {', '.join(available)}: {line} (in an environment without the CPU-only "
            "onnxruntime), or use provider 'cpu'."
        )
    return wanted


def _device_of(providers: list[Any]) -> Device:
    """CUDA's memory for a list that starts with CUDA; host memory for every other."""
    first: Any = providers[0]
    name: str = first if isinstance(first, str) else first[0]
    options: dict[str, Any] = {} if isinstance(first, str) else first[1]
    if name == "CUDAExecutionProvider":
        return Device(kind="cuda", index=int(options.get("device_id", 0)))
    return CPU
