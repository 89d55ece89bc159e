"""The table of settings: each with its variable, flag, TOML key, kind, default and meaning.

A new setting is added here: a field of Settings and a row of KNOBS. `environment` reads values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import StrEnum

from dflash_protocol.device import MAX_DEVICE_INDEX, Device
from dflash_protocol.settings.kinds import (
    Cores,
    Daemons,
    DaemonSetting,
    DeviceOrAuto,
    Endpoints,
    EndpointText,
    Kind,
    OneOf,
    PathText,
    Switch,
    Whole,
    WholeOrAuto,
)

PREFIX = "DFLASH_MOE_"
"""Prefix of all our variables; an unknown one is an error."""
EXPERT_COMPUTE = PREFIX + "EXPERT_COMPUTE_"

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}", re.ASCII)

MAX_THREADS = 1024
"""Maximum number of compute threads of a process."""

AUTO_TIER = "auto"
YARN_READINGS = ("file", "llama.cpp")
CPU_TIERS = (AUTO_TIER, "amx", "avx512vnni", "avxvnni", "avx2", "neondot", "generic")
"""Instruction sets that the CPU's kernels may be built from; ``auto`` is the best that works."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The value of every setting. Times are in the unit of their name."""

    model: str = ""
    """GGUF file; empty = the demo model."""
    context: int | None = None
    """Positions that a sequence may have; None = the model's, up to 32,768."""
    local_experts: int | None = None
    """Experts a layer that a parent with daemons keeps; None = an even share."""
    backend: str = "auto"
    """Kernels of a process that computes on the CPU, one of BACKENDS."""
    kv_type: str = "auto"
    """Element type of the KV cache, one of KV_TYPES."""
    daemons: tuple[DaemonSetting, ...] = ()
    """Daemons to spawn."""
    connect: tuple[str, ...] = ()
    """Endpoints of daemons that are running already."""
    ipc_required: bool = False
    """Whether a lost daemon is an error; else the parent computes its experts."""
    ipc_mode: str = "auto"
    """How prefill is cut into requests: ``batched``, ``stream`` or ``auto``."""
    ipc_transport: str = "auto"
    """Transport of payloads: ``device``, ``shared``, ``stream`` or ``auto``."""
    ipc_dtype: str = "f32"
    """Element type of payloads: ``f32``, ``f16`` or ``bf16``."""
    prefill_offload: str = "auto"
    """Whether a parent on a GPU computes CPU owners' experts during prefill, with copies of their
    weights: ``auto``, ``on`` or ``off``."""
    batch_capacity: int = 1024
    """Most tokens in one request to a daemon."""
    stream_batch: int = 4
    """Most tokens in one request of mode ``stream``; at most `stream_batch_max`."""
    stream_batch_max: int = 32
    """Bound of `stream_batch`."""
    ipc_shared_bytes: int = 0
    """Minimum size of a link's shared segment; the size needed is used if larger."""
    spin_us: int | None = None
    """How long a side polls the shared ring before it sleeps; None = by the number of cores."""
    check_replies: int | None = None
    """The parent recomputes and compares one reply in this many; 0 = none, None = one in some
    thousands, while that takes at most a thousandth of the time."""
    ipc_profile: bool = False
    """Log where the time at the boundary goes."""
    deadline_ms: int = 250
    """Shortest time a daemon is given to answer one request."""
    step_limit_ms: int = 200
    """Time limit of a decode step in which GPUs ask each other."""
    mail_memory: str = "auto"
    """Memory of the mailbox between GPUs: ``host``, or ``auto``, whichever is faster."""
    heartbeat_ms: int = 1000
    """Time between two pings on a link; after five without an answer the daemon counts as lost."""
    connect_timeout_ms: int = 10_000
    """Longest silence while a daemon is started, connected to, or loading."""
    ipc_bin: str = ""
    """Launcher of daemons that name none; empty = this interpreter."""
    ipc_gpu: int = 0
    """Index of a daemon's device if it names a kind without one."""
    device: Device | None = None
    """Device that a process computes on; None = it chooses."""
    threads: int = 0
    """Compute threads of a process; 0 = one for each physical core it may use."""
    data_port: int = 0
    """Port of a tcp daemon's data socket; 0 = any free one."""
    listen: str = ""
    """Endpoint of a daemon; empty = one in the run directory, named by its device."""
    placement: str = ""
    """Placement file of a daemon; empty = it loads what its parents ask for."""
    cores: str = ""
    """Processors that a daemon is pinned to, as in ``0-3,8``; empty = all that it may use."""
    pin_daemons: bool = False
    """Whether each spawned daemon is pinned to its own share of the cores."""
    cpu_tier: str = AUTO_TIER
    """Instruction set of the CPU's kernels, one of CPU_TIERS."""
    yarn: str = YARN_READINGS[0]
    """Source of YaRN's parameters, one of YARN_READINGS."""
    run_dir: str = ""
    """Folder of sockets, locks and shared memory; empty = ``$XDG_RUNTIME_DIR/dflash-moe``, or in
    ``/dev/shm``, or in the temp dir."""
    cache_dir: str = ""
    """Folder of compiled kernels; empty = ``$XDG_CACHE_HOME/dflash-moe`` or ``~/.cache/…``."""
    keys_dir: str = ""
    """Folder of the keys of tcp links; empty = ``keys`` in ``$XDG_CONFIG_HOME/dflash-moe`` or
    ``~/.config/dflash-moe``."""
    host: str = "127.0.0.1"
    """Address or name that the server listens on."""
    port: int = 8080
    """Port of the server; 0 = any free one."""
    api_key_file: str = ""
    """File with the keys that the server requires; empty = none."""
    chat_template_file: str = ""
    """Jinja chat template of the server; empty = the model's."""
    queue_capacity: int = 64
    """Maximum number of requests queued at the server."""
    max_body_bytes: int = 4 << 20
    """Maximum size of the body of a request to the server."""


class Reader(StrEnum):
    """Which programs read a setting."""

    PARENT = "parent"
    DAEMON = "daemon"
    EACH = "each"
    """Parent and daemon, each with its own value."""
    BOTH = "both"
    """Parent and daemon; a parent passes its value on to the daemons that it spawns."""
    SERVER = "server"
    """A parent that runs the HTTP server."""


class HostName(Kind):
    """An IP address or a host name."""

    metavar = "ADDRESS"
    allowed = "an address or a host name, as in 127.0.0.1 or ::1"

    def from_text(self, text: str) -> str:
        if not _HOST.fullmatch(text):
            raise self.refused()
        return text


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting's names and help. `name` is its variable without the prefix.

    TOML key and flag are derived from the name unless given. A flag without dashes is a positional
    argument.
    """

    name: str
    field: str
    kind: Kind
    reader: Reader
    help: str
    special_flag: str = ""
    special_key: str = ""
    older_variable: str = ""

    @property
    def variable(self) -> str:
        return (PREFIX if self.reader is Reader.SERVER else EXPERT_COMPUTE) + self.name

    @property
    def flag(self) -> str:
        return self.special_flag or "--" + self.name.lower().replace("_", "-")

    @property
    def is_argument(self) -> bool:
        """Whether it is a positional argument."""
        return not self.flag.startswith("--")

    @property
    def key(self) -> str:
        """Its key in a settings file."""
        return self.special_key or self.name.lower()

    @property
    def default(self) -> object:
        return _DEFAULTS[self.field]

    @property
    def default_text(self) -> str:
        """The default, as shown in help and documents."""
        if isinstance(self.kind, Switch):
            return "off"
        return "" if self.default == () else self.kind.to_text(self.default)


_DEFAULTS = {each.name: each.default for each in fields(Settings)}

SETTINGS_FILE = PREFIX + "SETTINGS_FILE"
SETTINGS_FLAG = "--settings"
SETTINGS_HELP = f"Settings file, TOML; else the one that {SETTINGS_FILE} names."

BACKENDS = ("auto", "reference", "cpu")
KV_TYPES = ("auto", "f32", "f16", "q8_0")
_MODES = ("auto", "batched", "stream")
_TRANSPORTS = ("auto", "device", "shared", "stream")
_DTYPES = ("f32", "f16", "bf16")
_OFFLOADS = ("auto", "on", "off")

KNOBS = (
    Knob(
        "MODEL", "model", PathText("MODEL"), Reader.EACH,
        "GGUF file; default: the demo model. A daemon's must be named.",
        special_flag="MODEL",
    ),
    Knob(
        "CONTEXT", "context", WholeOrAuto(1, 1 << 30), Reader.PARENT,
        "Positions that a sequence may have; auto is the model's, up to 32768.",
    ),
    Knob(
        "LOCAL_EXPERTS", "local_experts", WholeOrAuto(0, 65_536), Reader.PARENT,
        "Experts of each layer that a parent with daemons keeps; auto is an even share.",
    ),
    Knob(
        "BACKEND", "backend", OneOf(*BACKENDS), Reader.EACH,
        "Kernels on the CPU: compiled ones, or the slow reference; auto is cpu where it runs.",
    ),
    Knob(
        "KV_TYPE", "kv_type", OneOf(*KV_TYPES), Reader.PARENT,
        "Element type of the KV cache; auto is f32 for a file of F32, else f16.",
    ),
    Knob(
        "DAEMONS", "daemons", Daemons(), Reader.PARENT,
        "Daemons to spawn. LAUNCHER: a Python or another executable.",
        special_flag="--daemon", special_key="[[daemon]]",
    ),
    Knob(
        "CONNECT", "connect", Endpoints(), Reader.PARENT,
        "Running daemons to connect to.",
    ),
    Knob(
        "IPC_REQUIRED", "ipc_required", Switch(), Reader.PARENT,
        "Fail if a daemon is lost, instead of computing its experts in the parent.",
        special_flag="--require-daemons",
    ),
    Knob(
        "IPC_MODE", "ipc_mode", OneOf(*_MODES), Reader.PARENT,
        "Prefill in one request a chunk, or in slices; auto keeps the one that is faster here.",
    ),
    Knob(
        "IPC_TRANSPORT", "ipc_transport", OneOf(*_TRANSPORTS), Reader.BOTH,
        "Payloads through shared memory or sockets; device = GPUs ask each other, with no host "
        "between layers of a decode step; auto = the first of these that both sides can.",
    ),
    Knob(
        "IPC_DTYPE", "ipc_dtype", OneOf(*_DTYPES), Reader.PARENT,
        "Type of the payload; f16 and bf16 halve it and round.",
    ),
    Knob(
        "PREFILL_OFFLOAD", "prefill_offload", OneOf(*_OFFLOADS), Reader.PARENT,
        "Compute CPU owners' experts of prompts on the parent's GPU, with copied weights; auto = "
        "if faster.",
    ),
    Knob(
        "IPC_BATCH_CAPACITY", "batch_capacity", Whole(1, 4096), Reader.BOTH,
        "Most tokens in one request; the smaller of both sides' counts, twice that between GPUs.",
    ),
    Knob(
        "BATCH", "stream_batch", Whole(1, 4096), Reader.PARENT,
        "Most tokens in one request of mode stream.",
    ),
    Knob(
        "BATCH_MAX", "stream_batch_max", Whole(1, 4096), Reader.PARENT,
        "Upper bound of BATCH; raise both.",
    ),
    Knob(
        "IPC_SHARED_BYTES", "ipc_shared_bytes", Whole(0, 1 << 40), Reader.BOTH,
        "Minimum size of a link's shared segment; what is needed is used if larger.",
    ),
    Knob(
        "IPC_SPIN_US", "spin_us", WholeOrAuto(0, 1_000_000), Reader.BOTH,
        "How long a side polls shared memory before it sleeps, in microseconds.",
    ),
    Knob(
        "CHECK_REPLIES", "check_replies", WholeOrAuto(0, 1_000_000_000), Reader.PARENT,
        "The parent recomputes and compares one reply in this many; 0 = none; auto = one in 4096, "
        "at most 0.1 % of the time.",
    ),
    Knob(
        "IPC_PROFILE", "ipc_profile", Switch(), Reader.BOTH,
        "Log where the time at the boundary goes.",
    ),
    Knob(
        "IPC_DEADLINE_MS", "deadline_ms", Whole(1, 3_600_000), Reader.PARENT,
        "Shortest time a daemon is given to answer one request.",
    ),
    Knob(
        "IPC_STEP_LIMIT_MS", "step_limit_ms", Whole(1, 60_000), Reader.PARENT,
        "Longest time of a decode step in which GPUs ask each other; then the host asks again.",
    ),
    Knob(
        "IPC_MAIL_MEMORY", "mail_memory", OneOf("auto", "host"), Reader.PARENT,
        "Memory that GPUs ask each other through: whichever is faster, or only the host's.",
    ),
    Knob(
        "HEARTBEAT_MS", "heartbeat_ms", Whole(10, 60_000), Reader.PARENT,
        "Time between pings; after five silent ones the daemon counts as lost.",
    ),
    Knob(
        "CONNECT_TIMEOUT_MS", "connect_timeout_ms", Whole(10, 3_600_000), Reader.PARENT,
        "Longest silence while connecting or loading (60 s for spawned daemons).",
    ),
    Knob(
        "IPC_BIN", "ipc_bin", PathText("LAUNCHER"), Reader.PARENT,
        "Launcher of daemons that name none; default: this interpreter.",
    ),
    Knob(
        "IPC_GPU", "ipc_gpu", Whole(0, MAX_DEVICE_INDEX), Reader.PARENT,
        "Index of a daemon's device if it names only a kind.",
    ),
    Knob(
        "DEVICE", "device", DeviceOrAuto(), Reader.EACH,
        "What the process computes on; auto is cpu. Daemons that are spawned name their own.",
    ),
    Knob(
        "THREADS", "threads", Whole(0, MAX_THREADS), Reader.EACH,
        "Compute threads of the process; 0 = one for each physical core it may use.",
        older_variable="DFLASH_COLD_THREADS",
    ),
    Knob(
        "DATA_PORT", "data_port", Whole(0, 65_535), Reader.DAEMON,
        "Port of the data socket beside that of a tcp endpoint, for firewalls; 0 = a free one.",
    ),
    Knob(
        "LISTEN", "listen", EndpointText(), Reader.DAEMON,
        "Where a daemon listens, beyond loopback with keys; "
        "default: daemon-DEVICE.sock in the run directory.",
    ),
    Knob(
        "PLACEMENT", "placement", PathText("FILE"), Reader.DAEMON,
        "Experts that a daemon loads at start and keeps, besides those that its parents ask for.",
    ),
    Knob(
        "CORES", "cores", Cores(), Reader.DAEMON,
        "Processors that a daemon is pinned to; default: all that it may use.",
    ),
    Knob(
        "PIN_DAEMONS", "pin_daemons", Switch(), Reader.PARENT,
        "Pin each spawned daemon to its own share of the cores.",
    ),
    Knob(
        "CPU_TIER", "cpu_tier", OneOf(*CPU_TIERS), Reader.BOTH,
        "Instruction set of the CPU's kernels.",
    ),
    Knob(
        "YARN", "yarn", OneOf(*YARN_READINGS), Reader.PARENT,
        "YaRN with the file's betas, or as llama.cpp does whatever the file says.",
    ),
    Knob(
        "IPC_WORK_DIR", "run_dir", PathText("DIR"), Reader.BOTH,
        "Folder of sockets and shared memory; default: $XDG_RUNTIME_DIR/dflash-moe, else in "
        "/dev/shm (if that has 1 GiB), else in the temp dir.",
    ),
    Knob(
        "CACHE_DIR", "cache_dir", PathText("DIR"), Reader.BOTH,
        "Folder of compiled kernels; default: $XDG_CACHE_HOME/dflash-moe, else in ~/.cache.",
    ),
    Knob(
        "KEYS_DIR", "keys_dir", PathText("DIR"), Reader.EACH,
        "Folder of keys; if named, a daemon asks for keys on loopback too; "
        "default: $XDG_CONFIG_HOME/dflash-moe/keys, else in ~/.config.",
    ),
    Knob(
        "HOST", "host", HostName(), Reader.SERVER,
        "Address that the server listens on; beyond loopback it needs keys.",
    ),
    Knob(
        "PORT", "port", Whole(0, 65_535), Reader.SERVER,
        "Port that the server listens on; 0 = a free one.",
    ),
    Knob(
        "API_KEY_FILE", "api_key_file", PathText("FILE"), Reader.SERVER,
        "File of mode 0600 with the keys that clients must have, one on a line.",
    ),
    Knob(
        "CHAT_TEMPLATE_FILE", "chat_template_file", PathText("FILE"), Reader.SERVER,
        "Jinja template in place of the model's own.",
    ),
    Knob(
        "QUEUE_CAPACITY", "queue_capacity", Whole(1, 10_000), Reader.SERVER,
        "Most requests that wait; of one client, half as many.",
    ),
    Knob(
        "MAX_BODY_BYTES", "max_body_bytes", Whole(1024, 1 << 30), Reader.SERVER,
        "Most bytes of a request's body.",
    ),
)  # fmt: skip

VARIABLES = tuple(sorted([SETTINGS_FILE, *(knob.variable for knob in KNOBS)]))
"""Names of all variables that are read."""


def knobs_of(*, daemon: bool) -> tuple[Knob, ...]:
    """The settings that a parent or, with `daemon`, a daemon takes as flags."""
    excluded = (Reader.PARENT if daemon else Reader.DAEMON, Reader.SERVER)
    return tuple(knob for knob in KNOBS if knob.reader not in excluded)


def server_knobs() -> tuple[Knob, ...]:
    """The settings that a server takes besides those of a parent."""
    return tuple(knob for knob in KNOBS if knob.reader is Reader.SERVER)
