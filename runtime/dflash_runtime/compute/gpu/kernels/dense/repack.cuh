// Rows of a GGUF file in the device layout (launch/layouts.py), gathered byte by byte.
#pragma once
#include "formats.cuh"

template <int Type, int Columns>
struct Repacked {
    static constexpr int ELEMENTS = Blocks<Type>::ELEMENTS, NUM_FIELDS = Blocks<Type>::NUM_FIELDS;
    static constexpr int NATIVE_BLOCKS = Columns / ELEMENTS;
    static constexpr int NATIVE_BYTES = NATIVE_BLOCKS * Blocks<Type>::BYTES;  // of a row in the file
    static constexpr int DEVICE_BLOCKS = (Columns + 63) / 64 * 64 / ELEMENTS;
    static constexpr int ROW_BYTES = ArrayOffset<Type, DEVICE_BLOCKS, NUM_FIELDS>::VALUE;
    static constexpr int PIECES = ROW_BYTES / 16;  // of 16 bytes, of a row

    // Piece `piece` of a row that begins at `row` in the file's layout; padding is 0.
    INLINE static uint4 piece(const u8 *row, int piece) {
        u32 words[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            words[w] = 0;
#pragma unroll
            for (int b = 0; b < 4; b++) {
                words[w] |= (u32)gathered<0>(row, 16 * piece + 4 * w + b) << (8 * b);
            }
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

private:
    // Byte `offset` of a row in the device layout.
    template <int Index>
    INLINE static u8 gathered(const u8 *row, int offset) {
        if constexpr (Index + 1 < NUM_FIELDS) {
            if (offset >= ArrayOffset<Type, DEVICE_BLOCKS, Index + 1>::VALUE) {
                return gathered<Index + 1>(row, offset);
            }
        }
        constexpr int Bytes = Field<Type, Index>::BYTES;
        const int inside = offset - ArrayOffset<Type, DEVICE_BLOCKS, Index>::VALUE;
        const int block = inside / Bytes;
        if (block >= NATIVE_BLOCKS) return 0;
        return row[block * Blocks<Type>::BYTES + Field<Type, Index>::OFFSET + inside % Bytes];
    }
};
