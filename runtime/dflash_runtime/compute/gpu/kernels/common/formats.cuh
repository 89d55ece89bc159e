// How kernels read weights: rows in the device layout (launch/layouts.py), in units of 64 weights.
//
// Quantised types:  Format<Type, Columns>
//   UNITS, ROW_BYTES        units and bytes per row
//   Raw                     one unit in registers, as stored
//   load(raw, row, unit)    may be called before wait_for_previous()
//   unpack(out, raw, unit)  64 signed bytes: four granules of 16, each with a scale and an offset
//   granule(unit, j)        index of the unit's j-th granule in the row, in groups of 16 elements
//   HAS_OFFSET              false: all offsets are zero
//   PAIRED                  granules 0 and 1 share scale and offset, and so do 2 and 3
//   ADJACENT                granule 1 follows 0 in the row, and 3 follows 2
// A weight is scale * byte + offset, exactly as the GGML type defines it.
//
// F32, F16 and BF16:  FloatRow<Type, Columns>, in units of 16 bytes.
#pragma once
#include "common.cuh"
#include "formats_table.cuh"

template <int Type>
struct IsFloat { static constexpr bool VALUE = Type == F32 || Type == F16 || Type == BF16; };

INLINE constexpr int padded_to(int size, int multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

// A row stores each field of its NumBlocks blocks as one array. VALUE is the byte offset of field
// Index's array; for Index = NUM_FIELDS it is the row's size.
template <int Type, int NumBlocks, int Index>
struct ArrayOffset {
    static constexpr int VALUE = ArrayOffset<Type, NumBlocks, Index - 1>::VALUE +
                                 (Field<Type, Index - 1>::BYTES * NumBlocks + 15) / 16 * 16;
};
template <int Type, int NumBlocks>
struct ArrayOffset<Type, NumBlocks, 0> { static constexpr int VALUE = 0; };

template <int Type, int Columns>
struct RowLayout {
    static_assert(Columns % Blocks<Type>::ELEMENTS == 0, "a row is whole blocks");
    static constexpr int UNITS = (Columns + 63) / 64;
    static constexpr int NumBlocks = UNITS * 64 / Blocks<Type>::ELEMENTS;
    static constexpr int ROW_BYTES = ArrayOffset<Type, NumBlocks, Blocks<Type>::NUM_FIELDS>::VALUE;

    // Address of field Index of a block.
    template <int Index>
    INLINE static const u8 *at(const u8 *row, int block) {
        return row + ArrayOffset<Type, NumBlocks, Index>::VALUE + Field<Type, Index>::BYTES * block;
    }
};

// An unpacked unit: four signed bytes per word, in element order; a granule is four words.
struct Unpacked {
    u32 q[16];
    float scale[4], offset[4];
};

template <int Type, int Columns>
struct Format;

// -- bytes packed in words --------------------------------------------------------------------

INLINE void put4(u32 *words, uint4 v) {
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
}
INLINE void load32(u32 (&words)[8], const u8 *p) {
    put4(words, load_weights16(p));
    put4(words + 4, load_weights16(p + 16));
}
INLINE u32 low_nibbles(u32 word) { return word & 0x0f0f0f0fu; }
INLINE u32 high_nibbles(u32 word) { return word >> 4 & 0x0f0f0f0fu; }
#ifndef HAS_SIGNED_BYTE
INLINE float signed_byte(u32 word, int index) { return (float)(i8)(word >> (8 * index)); }
#endif
INLINE u32 byte_of(u32 word, int index) { return word >> (8 * index) & 255u; }
// Moves bit i of the lowest four to bit 0 of byte i.
INLINE u32 spread_bits(u32 bits) { return (bits & 15u) * 0x00204081u & 0x01010101u; }

// PRMT: byte i of the result is byte `selector >> 4i & 7` of (b, a); a holds bytes 0 to 3.
#ifndef HAS_PERMUTE_BYTES
INLINE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const u64 both = (u64)b << 32 | a;
    u32 result = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        result |= ((u32)(both >> (8 * (selector >> (4 * i) & 7u))) & 255u) << (8 * i);
    }
    return result;
}
#endif

// A table of 16 signed bytes. look_up() translates the low and the high nibbles of four bytes.
struct NibbleTable { u32 words[4]; };
INLINE void look_up(u32 packed, const NibbleTable &table, u32 &low, u32 &high) {
    u32 found[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 nibbles = packed >> (16 * half);
        const u32 lower = permute_bytes(table.words[0], table.words[1], nibbles);
        const u32 upper = permute_bytes(table.words[2], table.words[3], nibbles);
        found[half] = permute_bytes(lower, upper, 0x3210u | (nibbles & 0x8888u) >> 1);
    }
    low = permute_bytes(found[0], found[1], 0x6420u);
    high = permute_bytes(found[0], found[1], 0x7531u);
}

#include "formats_32.cuh"
#include "formats_256.cuh"

// -- single weights and float rows ------------------------------------------------------------

// Weight i of granule j as a float.
INLINE float weight_of(const Unpacked &weights, int j, int i) {
    const float byte = signed_byte(weights.q[4 * j + i / 4], i % 4);
    return fmaf(weights.scale[j], byte, weights.offset[j]);
}

// Rows of F32, F16 or BF16; a unit is 16 bytes.
template <int Type, int Columns>
struct FloatRow {
    static constexpr int ELEMENTS = Type == F32 ? 4 : 8;
    static constexpr int UNITS = (Columns + ELEMENTS - 1) / ELEMENTS;
    static constexpr int ROW_BYTES = padded_to(Columns, 64) * (Type == F32 ? 4 : 2);
    struct Raw { u32 words[4]; };

    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        put4(raw.words, load_weights16(row + 16 * unit));
    }
    INLINE static float value(const Raw &raw, int index) {
        if constexpr (Type == F32) return bits_to_float(raw.words[index]);
        const u32 bits = raw.words[index / 2] >> (16 * (index % 2)) & 0xffffu;
        return Type == F16 ? half_to_float(bits) : bfloat_to_float(bits);
    }
};
