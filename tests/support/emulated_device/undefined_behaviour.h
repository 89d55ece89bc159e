// What the compiler calls where -fsanitize finds that a kernel does what C++ leaves undefined and
// devices punish: unaligned vectors, places outside of an array, shifts by too many bits.
#pragma once

#include "scheduler.h"

struct emulated_place {
    const char *file;
    u32 line, column;
};

#define EMULATED_FINDING(NAME, WHAT)                                                   \
    extern "C" __attribute__((noreturn, visibility("hidden"))) void NAME(              \
        const emulated_place *place, ...) {                                            \
        emulated::fail("%s:%u: %s", place->file, place->line, WHAT);                   \
    }
EMULATED_FINDING(__ubsan_handle_type_mismatch_v1_abort, "a pointer is null or not aligned")
EMULATED_FINDING(__ubsan_handle_out_of_bounds_abort, "an index outside of its array")
EMULATED_FINDING(__ubsan_handle_shift_out_of_bounds_abort, "a shift by too many bits")
EMULATED_FINDING(__ubsan_handle_divrem_overflow_abort, "a division by zero")
#undef EMULATED_FINDING
