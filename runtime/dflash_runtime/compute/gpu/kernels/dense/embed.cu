// embed: rows of the embedding table as float32. Grid T, THREADS threads: a block per token, a thread per
// unit of weights.
//
// Parameters: TYPE, ROWS and COLUMNS of the table, THREADS.
#include "formats.cuh"

struct EmbedArgs {
    const u8 *table;       // [ROWS, row bytes]
    const int *token_ids;  // [T]
    float *out;            // [T, COLUMNS]
};

INLINE void store4(float *out, int column, float4 v) {
    if (column < COLUMNS) *(float4 *)(out + column) = v;
}

template <int Type>
INLINE void expand(const u8 *table, int row_index, float *out) {
    if constexpr (IsFloat<Type>::VALUE) {
        using Row = FloatRow<Type, COLUMNS>;
        const u8 *row = table + (i64)row_index * Row::ROW_BYTES;
        for (int unit = thread_index(); unit < Row::UNITS; unit += THREADS) {
            typename Row::Raw raw;
            Row::load(raw, row, unit);
#pragma unroll
            for (int i = 0; i < Row::ELEMENTS; i += 4) {
                store4(out, Row::ELEMENTS * unit + i,
                       make_float4(Row::value(raw, i), Row::value(raw, i + 1),
                                   Row::value(raw, i + 2), Row::value(raw, i + 3)));
            }
        }
    } else {
        using Row = Format<Type, COLUMNS>;
        const u8 *row = table + (i64)row_index * Row::ROW_BYTES;
        for (int unit = thread_index(); unit < Row::UNITS; unit += THREADS) {
            typename Row::Raw raw;
            Unpacked weights;
            Row::load(raw, row, unit);
            Row::unpack(weights, raw, unit);
#pragma unroll
            for (int n = 0; n < 64; n += 4) {
                const int j = n / 16, i = n % 16;
                store4(out, 16 * Row::granule(unit, j) + i,
                       make_float4(weight_of(weights, j, i), weight_of(weights, j, i + 1),
                                   weight_of(weights, j, i + 2), weight_of(weights, j, i + 3)));
            }
        }
    }
}

KERNEL(embed, EmbedArgs, THREADS, 1) {
    let_next_begin();
    wait_for_previous();
    const int token = block_index_x();
    const int row_index = (int)load_fresh4(a.token_ids + token);
    float *out = a.out + (i64)token * COLUMNS;
    if ((u32)row_index < (u32)ROWS) {
        expand<TYPE>(a.table, row_index, out);
        return;
    }
    // An id outside the table gives NaN, which is detected later, instead of reading other memory.
    for (int i = thread_index(); i < COLUMNS; i += THREADS) out[i] = bits_to_float(0x7fc00000u);
}
