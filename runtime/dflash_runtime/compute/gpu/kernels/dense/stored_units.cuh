// Unpacks a unit of 64 quantised weights to halves in shared memory (dequantise.cu, gemm_tile.cuh).
//
// Chunks of 16 bytes are swizzled within each 128 bytes, as the rows of gemm_tile.cuh are, so that
// threads which write or read at the same time access different banks.
#pragma once
#include "formats.cuh"

#include "mma.cuh"

// Units of 64 consecutive weights. Most types have them anyway; Q6_K is specialised below.
template <int Type, int Columns>
struct UnitsInOrder : Format<Type, Columns> {};

// Unit 2h + q: groups 2q and 2q + 1 of half h (see Format<Q6_K>), in the low (q = 0) or high nibbles of
// its 64 bytes of low bits, which both units load. Scales 4q to 4q + 3 of the half's eight.
template <int Columns>
struct UnitsInOrder<Q6_K, Columns> : RowLayout<Q6_K, Columns> {
    using Row = RowLayout<Q6_K, Columns>;
    using Names = Blocks<Q6_K>;
    struct Raw { u32 quants[16], high[8], scales, scale; };

    INLINE static int granule(int unit, int j) { return 4 * unit + j; }
    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        const int block = unit / 4, half = unit / 2 % 2;
        const u8 *quants = Row::template at<Names::QUANTS>(row, block) + 64 * half;
#pragma unroll
        for (int i = 0; i < 4; i++) put4(raw.quants + 4 * i, load_weights16(quants + 16 * i));
        load32(raw.high, Row::template at<Names::HIGH>(row, block) + 32 * half);
        raw.scales = load_weights4(Row::template at<Names::SCALES>(row, block) + 4 * (unit % 4));
        raw.scale = load_weights2(Row::template at<Names::SCALE>(row, block));
    }
    INLINE static void unpack(Unpacked &out, const Raw &raw, int unit) {
        const int q = unit % 2;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const u32 bits = raw.high[i % 8] >> (4 * q + 2 * (i / 8));
            out.q[i] = low_nibbles(raw.quants[i] >> (4 * q)) | (bits & 0x03030303u) << 4;
        }
        const float scale = half_to_float(raw.scale);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out.scale[j] = scale * signed_byte(raw.scales, j);
            out.offset[j] = -32.0f * out.scale[j];
        }
    }
};

INLINE int swapped_place(int chunk) { return 16 * (chunk ^ (chunk / 8 % 8)); }

// Stores one unit. The row's first granule of 16 halves goes to chunks first_chunk and first_chunk + 1.
template <typename Weights>
INLINE void store_unit(u8 *tile, const typename Weights::Raw &raw, int unit, int first_chunk) {
    Unpacked unpacked;
    Weights::unpack(unpacked, raw, unit);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float scale = unpacked.scale[j], offset = unpacked.offset[j];
        const int chunk = first_chunk + 2 * Weights::granule(unit, j);
        u32 halves[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 word = unpacked.q[4 * j + i / 2] >> (16 * (i % 2));
            halves[i] = floats_to_halves(
                scale * signed_byte(word, 0) + offset, scale * signed_byte(word, 1) + offset);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            *(uint4 *)(tile + swapped_place(chunk + i)) = make_uint4(
                halves[4 * i], halves[4 * i + 1], halves[4 * i + 2], halves[4 * i + 3]);
    }
}
