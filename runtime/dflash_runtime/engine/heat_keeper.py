"""Keeps a model's heat: takes new counts from the runtime now and then, and saves them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dflash_adapters.gguf.file import GgufFile
from dflash_adapters.spec import ModelSpec
from dflash_protocol.errors import DflashError, SettingsError
from dflash_protocol.process.text_files import file_error, write_file
from dflash_protocol.settings import Settings
from dflash_runtime.engine.kept_files import HEAT_SUFFIX, kept_places, newest_first, write_first
from dflash_runtime.experts.runtime import MoeExpertComputeRuntime
from dflash_runtime.experts.telemetry import OwnerStats
from dflash_runtime.placement.heat import HEAT_PHASES, HalfLives, Heat, layers_of, phase_index
from dflash_runtime.placement.heat_file import (
    HEAT_KIND,
    HeatFile,
    heat_for_model,
    read_heat_file,
)

_LOG = logging.getLogger(__name__)

_STATS_KIND = "expert statistics"
_LEAST_APART_S = 0.5
_SHARE_OF_TIME = 1 / 200
"""Taking counts costs no more than this share of the time, however long it takes."""
_SAVE_EVERY_S = 60.0
_LAST_SAVE_S = 5.0
"""How long closing waits for a slow disk."""


class HeatStore:
    """The files of one model's heat: the first place that can be written to gets it.

    Used by one thread at a time. The model's file must be open.
    """

    def __init__(self, file: GgufFile, spec: ModelSpec, settings: Settings) -> None:
        self._spec = spec
        self._identity: Callable[[], str] = file.identity
        self._is_named = settings.heat not in ("auto", "off", "")
        self._places = kept_places(file.path, settings, HEAT_SUFFIX)
        self._bad: set[Path] = set()
        """Files that could not be read: kept beside the new one."""
        self._has_warned = False

    @property
    def is_kept(self) -> bool:
        """Whether heat is saved at all."""
        return bool(self._places)

    def load(self, half_lives: HalfLives) -> Heat:
        """The heat that was saved last; without any selections if there is none.

        A file that cannot be used is a warning, unless the user has named it.
        Raises: SettingsError.
        """
        for place in newest_first(HEAT_KIND, self._places, is_named=self._is_named):
            try:
                return self.read(place, half_lives)
            except SettingsError as error:
                if self._is_named:
                    raise
                self._bad.add(place)
                # docs: it is of another model, or damaged: counting begins anew. It is renamed to
                # end in `.bad` when new heat is saved
                _LOG.warning("not used: %s", error)
        return Heat(layers_of(self._spec.moe), half_lives)

    def read(self, path: Path, half_lives: HalfLives) -> Heat:
        """The heat of a file. Raises: SettingsError."""
        file = read_heat_file(path, half_lives=half_lives)
        return heat_for_model(path, file, self._spec, identity=self._identity())

    def save(self, heat: Heat) -> None:
        """Write the heat to the first place that takes it; a warning, once, if none does."""
        while self._bad:
            place = self._bad.pop()
            with contextlib.suppress(OSError):  # then it cannot be written either
                place.replace(place.with_name(place.name + ".bad"))
        error = write_first(HEAT_KIND, self._places, self.content(heat))
        if error and not self._has_warned:
            self._has_warned = True
            # docs: neither beside the model nor in the cache folder can it be written, or not where
            # `--heat` says; it is tried again each minute, and all else goes on
            _LOG.warning("heat is not saved: %s", error)

    def content(self, heat: Heat) -> bytes:
        """The content of a file of this model's heat."""
        spec = self._spec
        return HeatFile(heat, spec.num_layers, self._identity(), spec.name).as_bytes()


class HeatKeeper:
    """The heat of an engine's model, from when it is opened until it is closed.

    `update` takes the difference of the runtime's counters since the last time: steps are not
    slowed by counting. Once there are new counts a thread saves them, each minute and at the end;
    it works on copies. All methods belong to the thread that uses the engine.
    Owns: that thread, until closed.
    """

    def __init__(
        self,
        heat: Heat,
        *,
        store: HeatStore | None = None,
        hotness: Heat | None = None,
        stats_path: Path | None = None,
    ) -> None:
        """`hotness`: what the user wants experts placed by. `stats_path` gets the selections of
        this run alone."""
        self.hotness = hotness
        self._heat = heat
        self._of_run = None if stats_path is None else Heat(heat.layers, heat.half_lives)
        self._store, self._stats_path = store, stats_path
        self._num_before = int(heat.totals.sum())
        self._counted = np.zeros(heat.shape, np.int64)
        self._pairs: dict[str, list[int]] = {}
        self._due_s = time.monotonic() + _LEAST_APART_S
        self._lock = threading.Lock()
        """Held while the heat is changed or copied."""
        self._stop = threading.Event()
        self._saver: threading.Thread | None = None

    @property
    def is_kept(self) -> bool:
        """Whether it is saved."""
        return self._store is not None and self._store.is_kept

    @property
    def is_due(self) -> bool:
        """Whether `update` should be called."""
        return time.monotonic() >= self._due_s

    def update(self, runtime: MoeExpertComputeRuntime) -> None:
        """Add what was counted since the last call."""
        started_s = time.monotonic()
        counted, pairs = runtime.selections_by_phase(), _pairs_of(runtime.stats())
        new = counted - self._counted
        if new.any() or pairs != self._pairs:
            new_pairs = {
                name: [now - then for now, then in zip(each, before, strict=True)]
                for name, each in pairs.items()
                for before in (self._pairs.get(name, [0] * len(each)),)
            }
            with self._lock:
                for heat in (self._heat, self._of_run):
                    if heat is not None:
                        heat.add(new)
                        heat.add_pairs(new_pairs)
                self._counted, self._pairs = counted, pairs
        if new.any():
            self._start_saving()
        ended_s = time.monotonic()
        self._due_s = ended_s + max(_LEAST_APART_S, (ended_s - started_s) / _SHARE_OF_TIME)

    def copy(self) -> Heat:
        """The heat as of the last `update`."""
        with self._lock:
            return self._heat.copy()

    def for_planning(self) -> Heat:
        """What experts are to be placed by: the user's file, else a copy of the heat."""
        return self.copy() if self.hotness is None else self.hotness

    def close(self) -> None:
        """Save what is new, and the statistics of this run. A slow disk is waited for up to
        _LAST_SAVE_S. Idempotent."""
        if self._stop.is_set():
            return
        if self._stats_path is not None and self._pairs:  # else the engine was never open
            self._start_saving()
        self._stop.set()
        if self._saver is not None:
            self._saver.join(_LAST_SAVE_S)
            if self._saver.is_alive():
                # docs: the disk is slow, or hangs; what was saved before is whole
                _LOG.warning("heat may not be saved: the disk took more than %g s", _LAST_SAVE_S)

    def _start_saving(self) -> None:
        is_wanted = self.is_kept or self._stats_path is not None
        if is_wanted and self._saver is None and not self._stop.is_set():
            saver = threading.Thread(target=self._save, name="dflash-heat", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread now; the next update tries again
                saver.start()
                self._saver = saver

    def _save(self) -> None:
        assert self._store is not None
        num_saved, is_over = 0, False
        while not is_over:
            is_over = self._stop.wait(_SAVE_EVERY_S)
            heat = self.copy()
            num_new = int(heat.totals.sum()) - self._num_before
            try:
                if self._store.is_kept and num_new != num_saved:
                    self._store.save(heat)
                    num_saved = num_new
                if is_over and self._stats_path is not None and self._of_run is not None:
                    write_file(_STATS_KIND, self._stats_path, self._store.content(self._of_run))
            except (DflashError, OSError, ValueError) as error:  # the model's file may be gone
                # docs: statistics cannot be written where `--expert-stats` says, or the model's
                # file cannot be read any more
                _LOG.warning("counts of experts are not written: %s", error)


def _pairs_of(owners: Mapping[str, OwnerStats]) -> dict[str, list[int]]:
    """How many pairs each owner has computed, by name, then by HEAT_PHASES."""
    counted = {name: [0] * len(HEAT_PHASES) for name in owners}
    for name, owner in owners.items():
        for phase, stats in owner.phases.items():
            counted[name][phase_index(phase)] += stats.pairs
    return counted


def open_heat(file: GgufFile, spec: ModelSpec, settings: Settings) -> HeatKeeper:
    """The keeper of an open model's heat, with what was saved before.

    Raises: SettingsError if a file that the settings name cannot be used.
    """
    if settings.heat_fast > settings.heat_slow:
        raise SettingsError(
            f"heat_fast={settings.heat_fast}: must be at most heat_slow, {settings.heat_slow}"
        )
    half_lives = HalfLives(settings.heat_fast, settings.heat_slow)
    store = HeatStore(file, spec, settings)
    hotness = stats_path = None
    if settings.hotness:
        hotness = store.read(Path(settings.hotness).absolute(), half_lives)
    if settings.expert_stats:
        stats_path = Path(settings.expert_stats).absolute()
        _require_folder(stats_path)
    return HeatKeeper(store.load(half_lives), store=store, hotness=hotness, stats_path=stats_path)


def _require_folder(path: Path) -> None:
    """Raises: SettingsError if a file can clearly not be made there."""
    if os.path.isdir(path):
        raise file_error(_STATS_KIND, path, "is a folder")
    has_folder = os.path.isdir(path.parent) and os.access(path.parent, os.W_OK | os.X_OK)
    if not os.path.exists(path) and not has_folder:
        raise file_error(_STATS_KIND, path, "its folder does not exist or cannot be written to")
