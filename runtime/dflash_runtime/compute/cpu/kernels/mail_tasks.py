"""Answers a device's requests for this process's experts, layer by layer, without Python. The
device may be another process's.

A thread of its own serves steps (`serve_kernel`): each time one is asked for, it waits in every
layer for the request's lines, as mailbox_layout.py describes them, computes the pairs that it finds
there, and writes the reply's, each column by the thread that has computed it. A layer of which it
is asked nothing gets no reply, but for the last one, by which the device knows that all requests of
the step have been read.

A wait ends when a side aborts the step, or at the step's time limit; then the rest of the step is
left out. In a daemon (cpu/mail.py) another process writes the lines: each word is read once, only
ids say where something lies, and those that are none of the layer's experts are left out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from dflash_runtime.compute.cpu.compile.compiling import (
    Kernel,
    RowFunction,
    compile_kernel,
    compile_task,
    helper,
)
from dflash_runtime.compute.cpu.kernels import experts_kernel as experts
from dflash_runtime.compute.cpu.kernels.words import get, set_word, word
from dflash_runtime.compute.cpu.simd import vectors as v
from dflash_runtime.compute.cpu.simd.atomics import (
    atomic_add,
    atomic_load,
    atomic_store,
    relaxed_load,
    relaxed_store,
)
from dflash_runtime.compute.cpu.simd.types import (
    DOUBLE,
    FLOAT,
    I32,
    emit_load,
    emit_store,
    i64,
    lanes_of,
    primitive,
    void,
)
from dflash_runtime.compute.cpu.simd.untyped import ir, types
from dflash_runtime.compute.cpu.threads import system
from dflash_runtime.compute.cpu.threads.parallel import LINE, call_task
from dflash_runtime.compute.cpu.weights.repacked.step_kernels import (
    INTEGER_SUMS_AT,
    PAIR_SUM_AT,
    SCALES_AT,
    STEP_BLOCK_BYTES,
    SUMS_AT,
)
from dflash_runtime.compute.mailbox_layout import CHECK_FACTOR, HALF_BYTES, LINE_BYTES
from dflash_runtime.compute.step_order import MOST_TOKENS

# Words of a layer's call, after those of experts_kernel.
(
    LOOP,  # address of the words below
    REQUEST,  # of its lines
    REPLY,
    NUM_USED,
    QUANTS_AT,  # of the request's parts; 0: it has none. See mailbox_layout.part_words
    META_AT,
    FLOATS_AT,
    QUANT_BYTES,  # of a row's lines in the parts that have quants and what belongs to them
    META_BYTES,
    ANSWERS_ALWAYS,  # not 0: the last layer
    ROUNDS,  # written here: whether the reply may be rounded
    LEAVES_SECOND,  # not 0: the pairs of the second expert that is asked for are left to the device
    WRITES_FLOATS,  # not 0: an arena predicts with a token's row, which comes as step blocks
    NUM_WORDS,
) = range(experts.NUM_ARGUMENTS, experts.NUM_ARGUMENTS + 14)

# Words of the loop. Each of the first three has a cache line of its own.
ASKED, DONE, ENDED = 0, LINE, 2 * LINE
"""Number of steps asked for, by another thread, and done; not 0: the loop is to end."""
(
    NUM_TOKENS,  # of the steps that are asked for
    EPOCH,  # of the last step; a step's is one more
    LIMIT_NS,  # of a step
    SPIN_NS,  # how long a next step is polled for before the thread sleeps
    DEADLINE_NS,  # of the step at hand
    OWN_ABORT,  # addresses of abort words: written here, and by the device
    OTHER_ABORT,
    TOTAL_LAYERS,  # totals of what was served: layers
    TOTAL_ASKED,  # those of which something was asked
    TOTAL_PAIRS,
    TOTAL_NS,  # spent on their experts
    CALLS,  # by number of tokens up to MOST_TOKENS, from 0: address of calls, and how many
) = range(3 * LINE, 3 * LINE + 12)
NUM_LOOP_WORDS = CALLS + 2 * (MOST_TOKENS + 1)

_WORD = 0xFFFFFFFF
_NOTHING = -1
_POLLS = 64
"""Polls of a line between two reads of the clock."""
_SLEEP_US = 250_000
_BLOCK = 32
"""Values of a step block."""


# -- lines ----------------------------------------------------------------------------------------


@helper
def _is_over(loop: int) -> bool:
    """Whether the step has failed; it does, if its time is up."""
    own = get(loop, OWN_ABORT)
    if relaxed_load(own) != 0:
        return True
    is_ended = relaxed_load(loop + 8 * ENDED) != 0 or relaxed_load(get(loop, OTHER_ABORT)) != 0
    if not is_ended and system.monotonic_ns() <= get(loop, DEADLINE_NS):
        return False
    atomic_store(own, get(loop, EPOCH))
    return True


@helper
def _word_of(half: int, epoch: int) -> int:
    """The word in half a line, or _NOTHING if that is not of this epoch."""
    found, check = half & _WORD, (half >> 32) & _WORD
    return found if check == (epoch ^ (found * CHECK_FACTOR)) & _WORD else _NOTHING


@helper
def _await_word(half: int, loop: int) -> int:
    """The word in half a line, once it has arrived; _NOTHING if the step fails before."""
    epoch, polls = get(loop, EPOCH), 0
    found = _word_of(relaxed_load(half), epoch)
    while found < 0:
        system.pause()
        polls += 1
        if polls % _POLLS == 0 and _is_over(loop):
            return _NOTHING
        found = _word_of(relaxed_load(half), epoch)
    return found  # type: ignore[no-any-return]


def _deinterleaved(builder: Any, lines: Any, first: int) -> Any:
    """Every second word of a vector, from this one on."""
    places = ir.Constant(
        lanes_of(I32, lines.type.count // 2), list(range(first, lines.type.count, 2))
    )
    return builder.shuffle_vector(lines, lines, places)


def _emit_checks(builder: Any, words: Any, epoch: Any) -> Any:
    """What belongs beside each word of a vector."""
    count = words.type.count
    factors = ir.Constant(words.type, [_signed(CHECK_FACTOR)] * count)
    one = builder.insert_element(
        ir.Constant(words.type, ir.Undefined), builder.trunc(epoch, I32), I32(0)
    )
    epochs = builder.shuffle_vector(one, one, ir.Constant(lanes_of(I32, count), [0] * count))
    return builder.xor(epochs, builder.mul(words, factors))


def _signed(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number


@primitive(types.boolean, i64, i64, i64)
def _take_eight(builder: Any, lines: Any, epoch: Any, out: Any) -> Any:
    """Copy the eight words of four lines; whether all were of this epoch."""
    halves = emit_load(builder, lines, lanes_of(I32, 16))
    words, checks = (_deinterleaved(builder, halves, first) for first in (0, 1))
    emit_store(builder, out, words)
    wrong = builder.icmp_unsigned("!=", checks, _emit_checks(builder, words, epoch))
    bits = builder.bitcast(wrong, ir.IntType(8))
    return builder.icmp_unsigned("==", bits, ir.IntType(8)(0))


@helper
def _take_words(lines: int, num_words: int, loop: int, out: int) -> bool:
    """Copy words, eight at a time, as they arrive; False if the step fails before."""
    epoch = get(loop, EPOCH)
    for first in range(0, num_words, 8):
        source, target = lines + HALF_BYTES * first, out + 4 * first
        if first + 8 <= num_words and _take_eight(source, epoch, target):
            continue
        for index in range(min(8, num_words - first)):
            found = _await_word(source + HALF_BYTES * index, loop)
            if found < 0:
                return False
            v.store_i32(target + 4 * index, found)
    return True


def _emit_lines(builder: Any, out: Any, words: Any, epoch: Any) -> None:
    count = words.type.count
    order = [place for word in range(count) for place in (word, count + word)]
    checks = _emit_checks(builder, words, epoch)
    places = ir.Constant(lanes_of(I32, 2 * count), order)
    emit_store(builder, out, builder.shuffle_vector(words, checks, places))


@primitive(void, i64, i64, i64)
def _send_sums(builder: Any, sums: Any, epoch: Any, out: Any) -> None:
    """Write four float64 sums as four lines."""
    values = emit_load(builder, sums, lanes_of(DOUBLE, 4))
    _emit_lines(builder, out, builder.bitcast(values, lanes_of(I32, 8)), epoch)


@primitive(void, i64, i64, i64)
def _send_rounded(builder: Any, sums: Any, epoch: Any, out: Any) -> None:
    """Write four sums, rounded to float32, as two lines; their checks have another epoch."""
    values = builder.fptrunc(emit_load(builder, sums, lanes_of(DOUBLE, 4)), lanes_of(FLOAT, 4))
    _emit_lines(builder, out, builder.bitcast(values, lanes_of(I32, 4)), builder.not_(epoch))


# -- a layer --------------------------------------------------------------------------------------


@helper
def _take_pairs(args: int, loop: int) -> int:
    """Wait for the choice, and group the pairs that are asked for by ascending local id, those of
    an expert in the order of their tokens. How many there are; _NOTHING if the step has failed."""
    num_used, num_pairs = get(args, NUM_USED), 0
    first, second = _NOTHING, _NOTHING  # of the experts that are asked for
    ids, groups = get(args, experts.EXPERT_IDS), get(args, experts.GROUP_STARTS)
    tokens, weights = get(args, experts.TOKEN_INDICES), get(args, experts.WEIGHTS)
    for pair in range(get(args, experts.NUM_TOKENS) * num_used):
        line = get(args, REQUEST) + LINE_BYTES * pair
        expert = _await_word(line, loop)
        if expert < 0:
            return _NOTHING
        rounds = (expert >> 31) != (expert >> 30 & 1)
        if rounds:
            expert ^= 1 << 30
        set_word(args, ROUNDS, 1 if rounds else 0)
        if expert >= get(args, experts.NUM_EXPERTS):
            continue
        if first < 0:
            first = expert
        elif second < 0 and expert != first:
            second = expert
        if expert == second and get(args, LEAVES_SECOND) != 0:
            continue
        weight = _await_word(line + HALF_BYTES, loop)
        if weight < 0:
            return _NOTHING
        place = num_pairs
        num_pairs += 1
        while place > 0 and v.load_i32(ids + 4 * (place - 1)) > expert:
            for each in (ids, tokens, weights):
                v.store_i32(each + 4 * place, v.load_i32(each + 4 * (place - 1)))
            place -= 1
        v.store_i32(ids + 4 * place, expert)
        v.store_i32(tokens + 4 * place, pair // num_used)
        v.store_i32(weights + 4 * place, weight)
    num_groups = 0
    for pair in range(num_pairs):
        expert = v.load_i32(ids + 4 * pair)
        if num_groups == 0 or v.load_i32(ids + 4 * (num_groups - 1)) != expert:
            v.store_i32(ids + 4 * num_groups, expert)
            v.store_i32(groups + 4 * num_groups, pair)
            num_groups += 1
    v.store_i32(groups + 4 * num_groups, num_pairs)
    v.store_i64(args + 8 * experts.NUM_GROUPS, num_groups)
    return num_pairs


@helper
def _quant_sum(quants: int) -> float:
    """The sum of 16 int8, exactly."""
    total = 0
    for place in (quants, quants + 8):
        unsigned = v.load_i64(place) ^ -0x7F7F7F7F7F7F7F80
        pairs = (unsigned & 0x00FF00FF00FF00FF) + ((unsigned >> 8) & 0x00FF00FF00FF00FF)
        total += ((pairs * 0x0001000100010001) >> 48) & 0xFFFF
    return v.as_float(total - 16 * 128)  # type: ignore[no-any-return]


@helper
def _take_block(args: int, token: int, index: int, loop: int) -> bool:
    """Put 32 quants of a row, and what belongs to them, together as a step block."""
    num_blocks = get(args, experts.HIDDEN_SIZE) // _BLOCK
    block = get(args, experts.TOKEN_Q8) + STEP_BLOCK_BYTES * (num_blocks * token + index)
    quants = get(args, QUANTS_AT) + get(args, QUANT_BYTES) * token + 8 * HALF_BYTES * index
    meta = get(args, META_AT) + get(args, META_BYTES) * token + 4 * HALF_BYTES * index
    if not _take_words(quants, 8, loop, block):
        return False
    for granule in range(2):
        for at, half in ((SCALES_AT, 2 * granule), (SUMS_AT, 2 * granule + 1)):
            found = _await_word(meta + HALF_BYTES * half, loop)
            if found < 0:
                return False
            v.store_i32(block + at + 4 * granule, found)
        sums_at = block + INTEGER_SUMS_AT + 4 * granule
        v.store_float(sums_at, _quant_sum(block + 16 * granule))
    both = v.load_float(block + SUMS_AT) + v.load_float(block + SUMS_AT + 4)
    v.store_float(block + PAIR_SUM_AT, both)
    return True


@helper
def _take_rows(args: int, loop: int) -> bool:
    hidden_size = get(args, experts.HIDDEN_SIZE)
    for token in range(get(args, experts.NUM_TOKENS)):
        if get(args, QUANTS_AT) != 0:
            for index in range(hidden_size // _BLOCK):
                if not _take_block(args, token, index, loop):
                    return False
        if get(args, FLOATS_AT) != 0:
            lines = get(args, FLOATS_AT) + HALF_BYTES * hidden_size * token
            row = get(args, experts.HIDDEN) + 4 * hidden_size * token
            if not _take_words(lines, hidden_size, loop, row):
                return False
    return True


@helper
def _write_floats(args: int) -> None:
    """Write the row of the only token as float32."""
    for index in range(get(args, experts.HIDDEN_SIZE) // _BLOCK):
        block = get(args, experts.TOKEN_Q8) + STEP_BLOCK_BYTES * index
        low, high = v.load_float(block + SCALES_AT), v.load_float(block + SCALES_AT + 4)
        row = v.from_signed(v.load_bytes(block)) * v.splat_halves(low, high)
        v.store_floats(get(args, experts.HIDDEN) + 4 * _BLOCK * index, row)


def _columns_done(args: int, first: int, end: int) -> None:
    """Write columns of the reply, and make their sums zero again, as they are before each layer.
    Hidden sizes are multiples of four (gpu.launch.decode_arrays.check_columns)."""
    epoch, hidden_size = get(get(args, LOOP), EPOCH), get(args, experts.HIDDEN_SIZE)
    for token in range(get(args, experts.NUM_TOKENS)):
        for index in range(hidden_size * token + first, hidden_size * token + end, 4):
            sums = get(args, experts.OUT) + 8 * index
            if word(args, ROUNDS) != 0:
                _send_rounded(sums, epoch, get(args, REPLY) + HALF_BYTES * index)
            else:
                _send_sums(sums, epoch, get(args, REPLY) + LINE_BYTES * index)
            for place in range(sums, sums + 32, 8):
                v.store_double(place, 0.0)


@helper
def _increase(loop: int, index: int, amount: int) -> None:
    relaxed_store(loop + 8 * index, relaxed_load(loop + 8 * index) + amount)


def _run_mailed(args: int, counter: int, pool: int) -> None:
    loop = get(args, LOOP)
    if relaxed_load(get(loop, OWN_ABORT)) != 0:
        return
    num_pairs = _take_pairs(args, loop)
    if num_pairs < 0:
        return
    _increase(loop, TOTAL_LAYERS, 1)
    if num_pairs == 0 and get(args, ANSWERS_ALWAYS) == 0:
        return
    if num_pairs == 0:
        call_task(get(args, experts.COLUMNS_DONE), args, 0, get(args, experts.HIDDEN_SIZE))
        return
    if not _take_rows(args, loop):
        return
    if get(args, WRITES_FLOATS) != 0:
        _write_floats(args)
    started_ns = system.monotonic_ns()
    if experts.run_experts(args, counter, pool) == 0:
        atomic_store(get(loop, OWN_ABORT), get(loop, EPOCH))
        return
    _increase(loop, TOTAL_ASKED, 1)
    _increase(loop, TOTAL_PAIRS, num_pairs)
    _increase(loop, TOTAL_NS, system.monotonic_ns() - started_ns)


# -- the loop -------------------------------------------------------------------------------------


@helper
def _await_step(loop: int) -> bool:
    """Poll for the next step, then sleep until it is asked for; False: the loop is to end."""
    asked, done = loop + 8 * ASKED, get(loop, DONE)
    spin_until_ns = system.monotonic_ns() + get(loop, SPIN_NS)
    polls = 0
    while atomic_load(asked) == done:
        if relaxed_load(loop + 8 * ENDED) != 0:
            return False
        system.pause()
        polls += 1
        if polls % _POLLS == 0 and system.monotonic_ns() > spin_until_ns:
            system.sleep_while(asked, done, _SLEEP_US)
    return relaxed_load(loop + 8 * ENDED) == 0  # type: ignore[no-any-return]


def _serve(loop: int, counter: int, pool: int) -> None:
    while _await_step(loop):
        program = loop + 8 * (CALLS + 2 * relaxed_load(loop + 8 * NUM_TOKENS))
        v.store_i64(loop + 8 * EPOCH, get(loop, EPOCH) + 1)
        v.store_i64(loop + 8 * DEADLINE_NS, system.monotonic_ns() + get(loop, LIMIT_NS))
        call = v.load_i64(program)
        for _ in range(v.load_i64(program + 8)):
            call_task(v.load_i64(call), v.load_i64(call + 8), counter, pool)
            call += 16
        atomic_store(loop + 8 * DONE, get(loop, DONE) + 1)


def _ask(loop: int, num_tokens: int) -> None:
    relaxed_store(loop + 8 * NUM_TOKENS, num_tokens)
    atomic_add(loop + 8 * ASKED, 1)
    system.wake(loop + 8 * ASKED)


def _end(loop: int) -> None:
    atomic_store(loop + 8 * ENDED, 1)
    atomic_add(loop + 8 * ASKED, 1)  # a thread that is about to sleep does not
    system.wake(loop + 8 * ASKED)


def compile_calls() -> None:
    """Compile what a thread needs, now rather than in the first step."""
    for compiled in (run_mailed, columns_done, serve_kernel, ask_kernel, end_kernel):
        compiled()


@cache
def run_mailed() -> RowFunction:
    """The function of a layer's call."""
    return compile_task(_run_mailed)


@cache
def columns_done() -> RowFunction:
    """For experts_kernel.COLUMNS_DONE."""
    return compile_task(_columns_done)


@cache
def serve_kernel() -> Kernel:
    """Serves steps until ENDED: (address of the loop's words, of a counter, pool)."""
    return compile_kernel(_serve, i64, i64, i64)


@cache
def ask_kernel() -> Kernel:
    """Asks for a step: (address of the loop's words, number of tokens)."""
    return compile_kernel(_ask, i64, i64)


@cache
def end_kernel() -> Kernel:
    """Ends the loop, and fails the step under way: (address of the loop's words)."""
    return compile_kernel(_end, i64)
