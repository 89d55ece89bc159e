"""A plan that a user has saved: read again, and compared with what else was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.registry import read_spec
from dflash_protocol.device import DeviceKind
from dflash_protocol.errors import SettingsError
from dflash_protocol.process.text_files import file_error, read_file
from dflash_protocol.settings import Settings
from dflash_runtime.engine.kept_plan import PLAN_BYTES
from dflash_runtime.engine.measuring.machine import gpus_of_machine, key_of_machine
from dflash_runtime.placement.plan import Plan, Setup
from dflash_runtime.placement.plan_record import OTHER_BOX, RecordOf, from_json
from dflash_runtime.placement.wishes import check_context


def saved_plan(path: Path, of: RecordOf, file: GgufFile, *, settings: Settings) -> Plan:
    """The plan of a file. Raises: SettingsError if it is of another model, machine, driver or
    version, or damaged, or if a setting contradicts it."""
    content = read_file("plan", path, limit_bytes=PLAN_BYTES)
    try:
        found = from_json(content, of)
    except SettingsError as error:
        raise file_error("plan", path, str(error).removeprefix("plan: ")) from error
    _check(settings, found.setup)
    check_context(found.setup.context, read_spec(file))
    of_plan = replace(settings, kv_type=found.setup.kv_type.value)
    if found.origin.box_key != key_of_machine(file, of_plan, gpus_of_machine()):
        raise file_error("plan", path, OTHER_BOX)
    return found


def _check(settings: Settings, setup: Setup) -> None:
    """Raises: SettingsError for a setting that the plan would change."""
    is_on_host = setup.device.kind is DeviceKind.CPU
    asked_device = setup.device if settings.device is None else settings.device
    asked_kv_type = setup.kv_type.value if settings.kv_type == "auto" else settings.kv_type
    layers, slots = settings.gpu_layers, settings.moe_cache_slots
    for flag, is_same, planned in (
        (f"--device={asked_device}", asked_device == setup.device, setup.device),
        (f"-ngl {layers}", layers is None or (layers == 0) == is_on_host, setup.device),
        (f"--context={settings.context}", settings.context in (None, setup.context), setup.context),
        (f"--moe-cache-slots={slots}", slots in (None, setup.cache_slots), setup.cache_slots),
        (f"--kv-type={asked_kv_type}", asked_kv_type == setup.kv_type, setup.kv_type),
    ):
        if not is_same:
            raise SettingsError(f"{flag} and --plan contradict each other: the plan has {planned}")
