"""The table of settings: each with its variable, flag, TOML key, kind, default and meaning.

A new setting is a field of Settings, and what reads it: flags, variables, files, help and documents
follow from the field. `environment` reads values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from dflash_protocol.device import MAX_DEVICE_INDEX, Device
from dflash_protocol.settings.kinds import (
    EXPERT_BUDGETS,
    MOST_MIB,
    Daemons,
    DaemonSetting,
    DeviceOrAuto,
    Endpoints,
    EndpointText,
    Kind,
    OneOf,
    Origins,
    Overrides,
    PathOrWord,
    PathText,
    Switch,
    SwitchOrAuto,
    Text,
    Whole,
    WholeOrAuto,
)

PREFIX = "DFLASH_MOE_"
"""Prefix of all our variables; an unknown one is an error."""
EXPERT_COMPUTE = PREFIX + "EXPERT_COMPUTE_"

HOST = Text(
    "ADDRESS", r"[A-Za-z0-9._:%-]{1,253}", "an address or a host name, as in 127.0.0.1 or ::1"
)
CORES = Text("LIST", r"[0-9,-]*", "numbers and ranges with commas, as in 0-3,8")

OTLP = Text(
    "URL",
    r"(https?://[!-~]{1,500})?",
    "the URL that takes traces over HTTP, as in http://127.0.0.1:4318/v1/traces",
)

TOKENS = Text("PROMPT:WRITTEN", r"[1-9][0-9]{0,6}:[0-9]{1,7}", "two numbers, as in 1000:400")

MAX_THREADS = 1024
"""Maximum number of compute threads of a process."""

AUTO_TIER = "auto"
YARN_READINGS = ("file", "llama.cpp")
CPU_TIERS = (AUTO_TIER, "amx", "avx512vnni", "avxvnni", "avx2", "neondot", "generic")
"""Instruction sets that the CPU's kernels may be built from; ``auto`` is the best that works."""

ANSWER_FORMATS = (
    "auto", "plain", "hermes", "qwen3-coder", "glm", "llama4", "mistral", "harmony",
    "deepseek-v3.1", "deepseek-v4", "kimi-k2", "minimax-m2", "lfm2", "gemma4",
    "llama3", "cohere", "seed-oss", "kimi-k3", "minimax-m3",
)  # fmt: skip
"""How models write reasoning and calls of tools; ``auto`` is told by the chat template."""

SETTINGS_FILE = PREFIX + "SETTINGS_FILE"
SETTINGS_FLAG = "--settings"
SETTINGS_HELP = f"Settings file, TOML; else the one that {SETTINGS_FILE} names."

BACKENDS = ("auto", "reference", "cpu")
KV_TYPES = ("auto", "f32", "f16", "q8_0")
_MODES = ("auto", "batched", "stream")
_TRANSPORTS = ("auto", "device", "shared", "stream")
_DTYPES = ("f32", "f16", "bf16")
_OFFLOADS = ("auto", "on", "off")
_CACHE_POLICIES = ("auto", "lru", "lfu", "static")
_MOE_MODES = ("auto", "resident", "cpu-moe", "remote", "layers", "hot", "mixed")


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
    CHAT = "chat"
    """A parent that somebody talks to in a terminal."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting's names and help. `name` is its variable without the prefix, `field` its field of
    Settings.

    TOML key and flag are derived from the name unless given. A flag without dashes is a positional
    argument.
    """

    name: str
    kind: Kind
    reader: Reader
    help: str
    special_flag: str = ""
    short_flag: str = ""
    """Another name of the flag, as llama.cpp has it."""
    special_key: str = ""
    older_variables: tuple[str, ...] = ()
    field: str = ""
    default: object = None

    @property
    def variable(self) -> str:
        of_one_command = self.reader in (Reader.SERVER, Reader.CHAT)
        return (PREFIX if of_one_command else EXPERT_COMPUTE) + self.name

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
    def default_text(self) -> str:
        """The default, as shown in help and documents."""
        if self.default is False:
            return "off"
        return "" if self.default == () else self.kind.to_text(self.default)


def setting(
    default: object,
    name: str,
    kind: Kind,
    reader: Reader,
    help: str,
    *,
    flag: str = "",
    short_flag: str = "",
    key: str = "",
    older_variables: tuple[str, ...] = (),
) -> Any:
    """A field of Settings: see Knob."""
    knob = Knob(name, kind, reader, help, flag, short_flag, key, older_variables)
    return field(default=default, metadata={Knob: knob})


@dataclass(frozen=True, slots=True)
class Settings:
    """The value of every setting, in the unit of its name. None of a number is ``auto``; an empty
    text is what the help calls its default."""

    # fmt: off
    model: str = setting(
        "", "MODEL", PathText("MODEL"), Reader.EACH,
        "GGUF file, or a model's name; default: the demo model. A daemon's must be named.",
        flag="MODEL",
    )
    context: int | None = setting(
        None, "CONTEXT", WholeOrAuto(1, 1 << 30), Reader.PARENT,
        "Positions that a sequence may have; auto is the model's, or the largest below it that "
        "costs little speed; on processors up to 32768.",
        short_flag="-c", older_variables=("DFLASH_MAX_CONTEXT",),
    )
    local_experts: int | None = setting(
        None, "LOCAL_EXPERTS", WholeOrAuto(0, 65_536), Reader.PARENT,
        "Experts of each layer on a parent's device; auto is planned, or none beside daemons.",
    )
    backend: str = setting(
        "auto", "BACKEND", OneOf(*BACKENDS), Reader.EACH,
        "Kernels on the CPU: compiled ones, or the slow reference; auto is cpu where it runs.",
    )
    kv_type: str = setting(
        "auto", "KV_TYPE", OneOf(*KV_TYPES), Reader.PARENT,
        "Element type of the KV cache; auto is f32 for a file of F32, else f16.",
    )
    daemons: tuple[DaemonSetting, ...] = setting(
        (), "DAEMONS", Daemons(), Reader.PARENT,
        "Daemons to spawn. LAUNCHER: a Python or another executable.",
        flag="--daemon",
        key="[[daemon]]",
    )
    connect: tuple[str, ...] = setting(
        (), "CONNECT", Endpoints(), Reader.PARENT,
        "Running daemons to connect to.",
    )
    ipc_required: bool = setting(
        False, "IPC_REQUIRED", Switch(), Reader.PARENT,
        "Fail if a daemon is lost, instead of computing its experts in the parent.",
        flag="--require-daemons",
    )
    ipc_mode: str = setting(
        "auto", "IPC_MODE", OneOf(*_MODES), Reader.PARENT,
        "Prefill in one request a chunk, or in slices; auto keeps the one that is faster here.",
    )
    ipc_transport: str = setting(
        "auto", "IPC_TRANSPORT", OneOf(*_TRANSPORTS), Reader.BOTH,
        "Payloads through shared memory or sockets; device = GPUs ask through mailboxes, with no "
        "host between layers of a decode step; auto = the first of these that both sides can.",
    )
    ipc_dtype: str = setting(
        "f32", "IPC_DTYPE", OneOf(*_DTYPES), Reader.PARENT,
        "Type of the payload; f16 and bf16 halve it and round.",
    )
    prefill_offload: str = setting(
        "auto", "PREFILL_OFFLOAD", OneOf(*_OFFLOADS), Reader.PARENT,
        "Compute CPU owners' experts of prompts on the parent's GPU, with copied weights; auto = "
        "if faster.",
    )
    batch_capacity: int = setting(
        1024, "IPC_BATCH_CAPACITY", Whole(1, 4096), Reader.BOTH,
        "Most tokens in one request; the smaller of both sides' counts, twice that between GPUs.",
    )
    stream_batch: int = setting(
        4, "BATCH", Whole(1, 4096), Reader.PARENT,
        "Most tokens in one request of mode stream.",
    )
    stream_batch_max: int = setting(
        32, "BATCH_MAX", Whole(1, 4096), Reader.PARENT,
        "Upper bound of BATCH; raise both.",
    )
    ipc_shared_bytes: int = setting(
        0, "IPC_SHARED_BYTES", Whole(0, 1 << 40), Reader.BOTH,
        "Minimum size of a link's shared segment; what is needed is used if larger.",
    )
    spin_us: int | None = setting(
        None, "IPC_SPIN_US", WholeOrAuto(0, 1_000_000), Reader.BOTH,
        "How long a side polls shared memory before it sleeps, in microseconds, and a daemon's "
        "threads for work; auto = by cores.",
    )
    check_replies: int | None = setting(
        None, "CHECK_REPLIES", WholeOrAuto(0, 1_000_000_000), Reader.PARENT,
        "The parent recomputes and compares one reply in this many; 0 = none; auto = one in 4096, "
        "at most 0.1 % of the time.",
    )
    ipc_profile: bool = setting(
        False, "IPC_PROFILE", Switch(), Reader.BOTH,
        "Log where the time at the boundary goes.",
    )
    deadline_ms: int = setting(
        250, "IPC_DEADLINE_MS", Whole(1, 3_600_000), Reader.PARENT,
        "Shortest time a daemon is given to answer one request.",
    )
    step_limit_ms: int = setting(
        200, "IPC_STEP_LIMIT_MS", Whole(1, 60_000), Reader.PARENT,
        "Longest time of a decode step in which GPUs ask each other; then the host asks again. Ten "
        "times that where a GPU asks a daemon's processor.",
    )
    mail_memory: str = setting(
        "auto", "IPC_MAIL_MEMORY", OneOf("auto", "host"), Reader.PARENT,
        "Memory that GPUs ask each other through: whichever is faster, or only the host's.",
    )
    heartbeat_ms: int = setting(
        1000, "HEARTBEAT_MS", Whole(10, 60_000), Reader.PARENT,
        "Time between pings; after five silent ones the daemon counts as lost.",
    )
    connect_timeout_ms: int = setting(
        10_000, "CONNECT_TIMEOUT_MS", Whole(10, 3_600_000), Reader.PARENT,
        "Longest silence while connecting or loading (60 s for spawned daemons).",
    )
    ipc_bin: str = setting(
        "", "IPC_BIN", PathText("LAUNCHER"), Reader.PARENT,
        "Launcher of daemons that name none; default: this interpreter.",
    )
    ipc_gpu: int = setting(
        0, "IPC_GPU", Whole(0, MAX_DEVICE_INDEX), Reader.PARENT,
        "Index of a daemon's device if it names only a kind.",
    )
    device: Device | None = setting(  # noqa: RUF009 - it is a field
        None, "DEVICE", DeviceOrAuto(), Reader.EACH,
        "What the process computes on; auto is cpu, or of a parent the fastest device. Spawned "
        "daemons name their own.",
    )
    threads: int = setting(
        0, "THREADS", Whole(0, MAX_THREADS), Reader.EACH,
        "Compute threads of the process; 0 = one for each physical core, within its CPU quota, and "
        "in decode steps as many as are fastest.",
        older_variables=("DFLASH_COLD_THREADS",),
    )
    data_port: int = setting(
        0, "DATA_PORT", Whole(0, 65_535), Reader.DAEMON,
        "Port of the data socket beside that of a tcp endpoint, for firewalls; 0 = a free one.",
    )
    listen: str = setting(
        "", "LISTEN", EndpointText(), Reader.DAEMON,
        "Where a daemon listens, beyond loopback with keys; "
        "default: daemon-DEVICE.sock in the run directory.",
    )
    placement: str = setting(
        "", "PLACEMENT", PathText("FILE"), Reader.EACH,
        "Experts that a daemon loads at start and keeps, besides those that its parents ask for; "
        "of a parent, those on its device, the others elsewhere.",
    )
    cores: str = setting(
        "", "CORES", CORES, Reader.DAEMON,
        "Processors that a daemon is pinned to; default: all that it may use.",
    )
    pin_daemons: bool = setting(
        False, "PIN_DAEMONS", Switch(), Reader.PARENT,
        "Pin each spawned daemon to its own share of the cores.",
    )
    cpu_tier: str = setting(
        AUTO_TIER, "CPU_TIER", OneOf(*CPU_TIERS), Reader.BOTH,
        "Instruction set of the CPU's kernels.",
    )
    yarn: str = setting(
        YARN_READINGS[0], "YARN", OneOf(*YARN_READINGS), Reader.PARENT,
        "YaRN with the file's betas, or as llama.cpp does whatever the file says.",
    )
    run_dir: str = setting(
        "", "IPC_WORK_DIR", PathText("DIR"), Reader.BOTH,
        "Folder of sockets and shared memory; default: $XDG_RUNTIME_DIR/dflash-moe, else in "
        "/dev/shm (if that has 1 GiB), else in the temp dir.",
    )
    cache_dir: str = setting(
        "", "CACHE_DIR", PathText("DIR"), Reader.BOTH,
        "Folder of compiled kernels and what was measured; default: $XDG_CACHE_HOME/dflash-moe, "
        "else in ~/.cache.",
    )
    keys_dir: str = setting(
        "", "KEYS_DIR", PathText("DIR"), Reader.EACH,
        "Folder of keys; if named, a daemon asks for keys on loopback too; "
        "default: $XDG_CONFIG_HOME/dflash-moe/keys, else in ~/.config.",
    )
    plan: str = setting(
        "", "PLAN", PathText("FILE"), Reader.PARENT,
        "Plan of where experts live, saved by dflash-moe plan; default: one is made.",
    )
    plan_for: str = setting(
        "1000:400", "PLAN_FOR", TOKENS, Reader.PARENT,
        "Request whose time a plan minimises: tokens of its prompt, and of what is written.",
    )
    fit: str = setting(
        "on", "FIT", OneOf("on", "off"), Reader.PARENT,
        "Choose what is not given so that it fits; off: place experts without a plan.",
    )
    moe_mode: str = setting(
        "auto", "MOE_MODE", OneOf(*_MOE_MODES), Reader.PARENT,
        "Way to place experts; auto is the fastest one.",
    )
    cpu_moe: bool | None = setting(
        None, "CPU_MOE", SwitchOrAuto(), Reader.PARENT,
        "Compute all routed experts on the processor, the rest on the GPU; 0: never by itself.",
    )
    n_cpu_moe: int | None = setting(
        None, "N_CPU_MOE", WholeOrAuto(0, 4096), Reader.PARENT,
        "The same for the experts of the first N layers; the others' stay on the GPU.",
    )
    override_tensor: tuple[tuple[str, str], ...] = setting(
        (), "OVERRIDE_TENSOR", Overrides(), Reader.PARENT,
        "Owner of experts whose tensors' names match: cpu, the GPU, or a daemon.",
        short_flag="-ot",
    )
    gpu_layers: int | None = setting(
        None, "GPU_LAYERS", WholeOrAuto(0, 65_536), Reader.PARENT,
        "Layers that a GPU computes: 0, or all of them, which any larger number means too.",
        short_flag="-ngl",
    )
    expert_budget_mb: int | None = setting(
        None, "EXPERT_BUDGET_MB", EXPERT_BUDGETS["expert_budget_mb"], Reader.PARENT,
        "Most MiB of experts on the parent's GPU.",
        older_variables=("DFLASH_EXPERT_BUDGET_MB",),
    )
    expert_budget_pct: int | None = setting(
        None, "EXPERT_BUDGET_PCT", EXPERT_BUDGETS["expert_budget_pct"], Reader.PARENT,
        "The same, as a percentage of the bytes of all experts.",
        older_variables=("DFLASH_EXPERT_BUDGET_PCT",),
    )
    device_memory_mb: int | None = setting(
        None, "DEVICE_MEMORY_MB", WholeOrAuto(0, MOST_MIB), Reader.PARENT,
        "Most MiB of the parent's GPU that are used in all; auto is what is free.",
    )
    host_memory_mb: int | None = setting(
        None, "HOST_MEMORY_MB", WholeOrAuto(0, MOST_MIB), Reader.EACH,
        "Most MiB of the machine's memory for experts of the processor; auto is what is free.",
    )
    heat: str = setting(
        "auto", "HEAT", PathOrWord("auto", "off"), Reader.PARENT,
        "Where counts of chosen experts are kept; auto is MODEL.heat, else in the cache folder.",
    )
    heat_fast: int = setting(
        500, "HEAT_FAST", Whole(1, 1_000_000_000), Reader.PARENT,
        "Tokens after which a selection counts half where a change of topic is to be followed.",
    )
    heat_slow: int = setting(
        20_000, "HEAT_SLOW", Whole(1, 1_000_000_000), Reader.PARENT,
        "The same in the long term; at least HEAT_FAST.",
    )
    hotness: str = setting(
        "", "HOTNESS", PathText("FILE"), Reader.PARENT,
        "Heat, or the older CSV of counts, that experts are placed by; default: the kept heat.",
        older_variables=("DFLASH_QWEN35MOE_HOTNESS", "DFLASH_LAGUNA_HOTNESS"),
    )
    swap_max: int = setting(
        48, "SWAP_MAX", Whole(0, 65_536), Reader.PARENT,
        "Most experts that change places with others in a round, as memory for copies on the "
        "parent's GPU permits; 0 keeps all experts where they are.",
        older_variables=("DFLASH_QWEN35MOE_SWAP_MAX", "DFLASH_LAGUNA_SWAP_MAX"),
    )
    moe_cache_slots: int | None = setting(
        None, "MOE_CACHE_SLOTS", WholeOrAuto(0, 31), Reader.PARENT,
        "Experts of each layer that decode steps keep on the parent's GPU besides those that live "
        "there; they are read over the bus when the processor would be asked for them; auto is "
        "planned.",
    )
    moe_predict_prefetch: bool = setting(
        True, "MOE_PREDICT_PREFETCH", Switch(), Reader.PARENT,
        "While a layer is computed, read from the disk what the next one will probably choose, if "
        "experts are larger than memory.",
    )
    moe_cache_policy: str = setting(
        "auto", "MOE_CACHE_POLICY", OneOf(*_CACHE_POLICIES), Reader.PARENT,
        "If experts are larger than memory, which ones leave it: lru, least recently used; lfu, "
        "least used in some hundred tokens; static, least used in thousands; auto = what finds "
        "most.",
    )
    moe_warmpin: int = setting(
        0, "MOE_WARMPIN", Whole(0, 65_536), Reader.PARENT,
        "So many of the hottest experts of a layer never leave the slots of MOE_CACHE_SLOTS, or, "
        "if experts are larger than memory, that: half of these at most.",
    )
    moe_warmpin_after: int = setting(
        1_000, "MOE_WARMPIN_AFTER", Whole(1, 1_000_000_000), Reader.PARENT,
        "Tokens that are written before MOE_WARMPIN chooses.",
    )
    swap_min_gain: int = setting(
        2, "SWAP_MIN_GAIN", Whole(0, 1_000_000), Reader.PARENT,
        "How many times what moving experts costs it has to save over the next 2,000 tokens.",
        older_variables=("DFLASH_QWEN35MOE_SWAP_MIN_GAIN", "DFLASH_LAGUNA_SWAP_MIN_GAIN"),
    )
    expert_stats: str = setting(
        "", "EXPERT_STATS", PathText("FILE"), Reader.PARENT,
        "File that gets this run's selections at its end, for dflash-moe stats.",
    )
    expert_trace: str = setting(
        "", "EXPERT_TRACE", PathText("FILE"), Reader.PARENT,
        "File that gets the experts of each token, for dflash-moe simulate.",
    )
    expert_trace_mb: int = setting(
        256, "EXPERT_TRACE_MB", Whole(1, 1024), Reader.PARENT,
        "Largest size of that file, in MiB.",
    )
    log_level: str = setting(
        "auto", "LOG_LEVEL", OneOf("auto", "debug", "info", "warning", "error"), Reader.BOTH,
        "Least important lines that are logged; auto: warnings, and of a server one a request.",
    )
    log_format: str = setting(
        "text", "LOG_FORMAT", OneOf("text", "json"), Reader.BOTH,
        "Lines on stderr: for people, or each a JSON object.",
    )
    host: str = setting(
        "127.0.0.1", "HOST", HOST, Reader.SERVER,
        "Address that the server listens on; beyond loopback it needs keys.",
    )
    port: int = setting(
        8080, "PORT", Whole(0, 65_535), Reader.SERVER,
        "Port that the server listens on; 0 = a free one.",
    )
    api_key_file: str = setting(
        "", "API_KEY_FILE", PathText("FILE"), Reader.SERVER,
        "File of mode 0600 with the keys that clients must have, one on a line.",
    )
    cors: tuple[str, ...] = setting(
        (), "CORS", Origins(), Reader.SERVER,
        "Web pages of these origins may use the server; * = of all, without keys only.",
    )
    chat_template_file: str = setting(
        "", "CHAT_TEMPLATE_FILE", PathText("FILE"), Reader.SERVER,
        "Jinja template in place of the model's own.",
    )
    answer_format: str = setting(
        "auto", "ANSWER_FORMAT", OneOf(*ANSWER_FORMATS), Reader.SERVER,
        "How the model writes reasoning and calls of tools; auto is told by its chat template.",
    )
    queue_capacity: int = setting(
        64, "QUEUE_CAPACITY", Whole(1, 10_000), Reader.SERVER,
        "Most requests that wait; of one client, half as many.",
    )
    max_body_bytes: int = setting(
        4 << 20, "MAX_BODY_BYTES", Whole(1024, 1 << 30), Reader.SERVER,
        "Most bytes of a request's body.",
    )
    chat_history: str = setting(
        "auto", "CHAT_HISTORY", PathOrWord("auto", "off"), Reader.CHAT,
        "File of mode 0600 with what was typed in chats; auto is "
        "$XDG_STATE_HOME/dflash-moe/chat-history, else in ~/.local/state.",
    )
    otlp_endpoint: str = setting(
        "", "OTLP_ENDPOINT", OTLP, Reader.SERVER,
        "OpenTelemetry collector that gets a span a request; needs the extra otel.",
    )
    # fmt: on


KNOBS: tuple[Knob, ...] = tuple(
    replace(each.metadata[Knob], field=each.name, default=each.default) for each in fields(Settings)
)
"""All settings, in order."""

VARIABLES = tuple(sorted([SETTINGS_FILE, *(knob.variable for knob in KNOBS)]))
"""Names of all variables that are read."""


def knobs_of(*, daemon: bool) -> tuple[Knob, ...]:
    """The settings that a parent or, with `daemon`, a daemon takes as flags."""
    excluded = (Reader.PARENT if daemon else Reader.DAEMON, Reader.SERVER, Reader.CHAT)
    return tuple(knob for knob in KNOBS if knob.reader not in excluded)


def server_knobs() -> tuple[Knob, ...]:
    """The settings that a server takes besides those of a parent."""
    return tuple(knob for knob in KNOBS if knob.reader is Reader.SERVER)


def chat_knobs() -> tuple[Knob, ...]:
    """The settings that a chat in a terminal takes besides those of a parent."""
    return tuple(
        knob for knob in KNOBS if knob.reader is Reader.CHAT or knob.field == "chat_template_file"
    )
