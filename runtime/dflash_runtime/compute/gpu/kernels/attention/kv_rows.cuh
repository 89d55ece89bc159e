// Rows of the KV cache: loads of eight elements (EightOf), and conversion of a float row to the stored
// format (store_row).
//
// KV_TYPE is 0 for f32, 1 for f16, 2 for q8_0: blocks of 32 signed bytes, with their scales (halves) in a
// separate array so that rows of bytes stay aligned. A row has KEY_ROW or VALUE_ROW elements, a multiple
// of 16 (q8_0: of 32); elements past the head's dimension are zero.
#pragma once
#include "common.cuh"

constexpr bool KV_F32 = KV_TYPE == 0, KV_F16 = KV_TYPE == 1, KV_Q8_0 = KV_TYPE == 2;
static_assert(KV_F32 || KV_F16 || KV_Q8_0, "an element type of the cache");
constexpr int KV_ELEMENT_BYTES = KV_F32 ? 4 : KV_F16 ? 2 : 1;
constexpr int Q8_BLOCK = 32;

// How a row is loaded, by who wrote it and who else reads it.
enum RowSource {
    READ_ONCE,   // no running kernel writes it; one warp needs it
    READ_OFTEN,  // no running kernel writes it; several warps of the block need it. Also shared memory
    READ_FRESH,  // a preceding kernel wrote it
};
template <int SOURCE>
INLINE uint4 read16(const void *p) {
    if constexpr (SOURCE == READ_ONCE) return load_weights16(p);
    else if constexpr (SOURCE == READ_FRESH) return load_fresh16(p);
    else return *(const uint4 *)p;
}
template <int SOURCE>
INLINE uint2 read8(const void *p) {
    if constexpr (SOURCE == READ_ONCE) return load_weights8(p);
    else if constexpr (SOURCE == READ_FRESH) return load_fresh8(p);
    else return *(const uint2 *)p;
}
template <int SOURCE>
INLINE u32 read_half(const u16 *p) {
    if constexpr (SOURCE == READ_ONCE) return load_weights2(p);
    else if constexpr (SOURCE == READ_FRESH) {  // loads the word around it: scale arrays are whole words
        const u64 address = (u64)p;
        return load_fresh4((const void *)(address & ~(u64)3)) >> (8 * (address & 2)) & 0xFFFF;
    } else return *p;
}

// The rows of one head; row r begins at element r * ROW.
struct HeadRows {
    u8 *elements;
    u16 *scales;
};
template <int ROW>
INLINE HeadRows head_rows(u8 *elements, u16 *scales, i64 first_row) {
    HeadRows rows;
    rows.elements = elements + first_row * (ROW * KV_ELEMENT_BYTES);
    rows.scales = KV_Q8_0 ? scales + first_row * (ROW / Q8_BLOCK) : scales;
    return rows;
}

INLINE u32 pack_halves(u16 low, u16 high) { return low | (u32)high << 16; }
INLINE u32 to_halves(float low, float high) {
    return pack_halves(float_to_half(low), float_to_half(high));
}

// Eight neighbouring elements of a row in registers, in the stored format.
template <int TYPE>
struct EightOf;

template <>
struct EightOf<0> {
    uint4 low, high;
    INLINE void clear() { low = high = make_uint4(0, 0, 0, 0); }
    template <int SOURCE, int ROW>
    INLINE void load(HeadRows rows, int row, int element) {
        const u8 *p = rows.elements + 4 * ((i64)row * ROW + element);
        low = read16<SOURCE>(p);
        high = read16<SOURCE>(p + 16);
    }
    INLINE void floats(float value[8]) const {
        value[0] = bits_to_float(low.x), value[1] = bits_to_float(low.y);
        value[2] = bits_to_float(low.z), value[3] = bits_to_float(low.w);
        value[4] = bits_to_float(high.x), value[5] = bits_to_float(high.y);
        value[6] = bits_to_float(high.z), value[7] = bits_to_float(high.w);
    }
};

template <>
struct EightOf<1> {
    uint4 halves_;
    INLINE void clear() { halves_ = make_uint4(0, 0, 0, 0); }
    template <int SOURCE, int ROW>
    INLINE void load(HeadRows rows, int row, int element) {
        halves_ = read16<SOURCE>(rows.elements + 2 * ((i64)row * ROW + element));
    }
    INLINE void floats(float value[8]) const {
        const u32 pairs[4] = {halves_.x, halves_.y, halves_.z, halves_.w};
#pragma unroll
        for (int i = 0; i < 8; i++) value[i] = half_to_float(pairs[i / 2] >> (16 * (i % 2)) & 0xFFFF);
    }
    INLINE uint4 halves() const { return halves_; }
};

template <>
struct EightOf<2> {
    uint2 bytes;
    u32 scale;
    INLINE void clear() { bytes = make_uint2(0, 0), scale = 0; }
    template <int SOURCE, int ROW>
    INLINE void load(HeadRows rows, int row, int element) {
        bytes = read8<SOURCE>(rows.elements + (i64)row * ROW + element);
        scale = read_half<SOURCE>(rows.scales + (i64)row * (ROW / Q8_BLOCK) + element / Q8_BLOCK);
    }
    INLINE void floats(float value[8]) const {
        const float factor = half_to_float(scale);
#pragma unroll
        for (int i = 0; i < 8; i++)
            value[i] = factor * (float)(i8)((i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)) & 0xFF);
    }
    INLINE uint4 halves() const {
        float v[8];
        floats(v);
        return make_uint4(to_halves(v[0], v[1]), to_halves(v[2], v[3]), to_halves(v[4], v[5]),
                          to_halves(v[6], v[7]));
    }
};

typedef EightOf<KV_TYPE> Eight;

// Converts one row from float32 to the stored format; called by a whole logical warp.
// q8_0 as in ggml: scale = largest magnitude / 127, rounded to a half only after the bytes have been
// computed with it; bytes round to nearest even. A block with NaN or infinity gets a scale of NaN, so
// that the fault is not hidden.
template <int ROW>
INLINE void store_row(const float *source, HeadRows rows, i64 row) {
    if constexpr (KV_F32) {
        float *target = (float *)rows.elements + row * ROW;
        for (int d = lane_index(); d < ROW; d += LANES) target[d] = source[d];
    } else if constexpr (KV_F16) {
        u32 *target = (u32 *)rows.elements + row * (ROW / 2);
        for (int pair = lane_index(); pair < ROW / 2; pair += LANES)
            target[pair] = to_halves(source[2 * pair], source[2 * pair + 1]);
    } else {
        constexpr int BLOCKS = ROW / Q8_BLOCK;
#pragma unroll
        for (int first = 0; first < BLOCKS; first += LANES / Q8_BLOCK) {
            const int block = first + lane_index() / Q8_BLOCK, place = lane_index() % Q8_BLOCK;
            const float value = block < BLOCKS ? source[block * Q8_BLOCK + place] : 0.0f;
            // As integers, the bits of magnitudes have the order of the magnitudes; NaN is the largest.
            u32 largest = float_to_bits(value) & 0x7FFFFFFF;
#pragma unroll
            for (int mask = Q8_BLOCK / 2; mask; mask >>= 1) {
                const u32 other = lane_xor(largest, mask);
                largest = other > largest ? other : largest;
            }
            const float scale = bits_to_float(largest) / 127.0f;
            const bool is_finite = largest < 0x7F800000;
            const u32 half = is_finite ? float_to_half(scale) : 0x7E00;
            const float inverse = half && is_finite ? reciprocal(scale) : 0.0f;
            const int byte = is_finite ? round_to_int(value * inverse) : 0;
            if (block < BLOCKS) {
                rows.elements[row * ROW + block * Q8_BLOCK + place] = (u8)byte;
                if (place == 0) rows.scales[row * BLOCKS + block] = (u16)half;
            }
        }
    }
}
