// Types with blocks of 256 elements, four units each: Q2_K to Q6_K and IQ4_XS. Included by formats.cuh.
#pragma once

// Q4_K and Q5_K, stored as in the file: the scale of scales and the scale of minima (halves), eight
// packed 6-bit scales and minima, the fifth bits (Q5_K), the quants. Unit p holds sub-block 2p in the
// low nibbles of its 32 bytes and sub-block 2p + 1 in the high ones.
template <int Type, int Columns>
struct BlocksWithMinima : RowLayout<Type, Columns> {
    using Row = RowLayout<Type, Columns>;
    static constexpr bool HAS_OFFSET = true, PAIRED = true, ADJACENT = true;
    static constexpr bool HAS_HIGH = Type == Q5_K;
    struct Raw { u32 quants[8], head[4], high[HAS_HIGH ? 8 : 1]; };

    INLINE static int granule(int unit, int j) { return 4 * unit + j; }
    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        const u8 *block = Row::template at<0>(row, unit / 4);
        load32(raw.quants, block + (HAS_HIGH ? 48 : 16) + 32 * (unit % 4));
        if constexpr (HAS_HIGH) load32(raw.high, block + 16);
        put4(raw.head, load_weights16(block));
    }
    INLINE static void unpack(Unpacked &out, const Raw &raw, int unit) {
        const int p = unit % 4;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            out.q[i] = low_nibbles(raw.quants[i]);
            out.q[8 + i] = high_nibbles(raw.quants[i]);
            if constexpr (HAS_HIGH) {
                const u32 bits = raw.high[i] >> (2 * p);
                out.q[i] |= (bits & 0x01010101u) << 4;
                out.q[8 + i] |= (bits >> 1 & 0x01010101u) << 4;
            }
        }
        // `scales` and `minima`: two bytes each, one per sub-block.
        const int shift = 16 * (p % 2);
        const u32 first = raw.head[1] >> shift, second = raw.head[2] >> shift;
        const u32 third = raw.head[3] >> shift;
        u32 scales = first & 0x3f3fu, minima = second & 0x3f3fu;
        if (p >= 2) {
            scales = (third & 0x0f0fu) | (first >> 2 & 0x3030u);
            minima = (third >> 4 & 0x0f0fu) | (second >> 2 & 0x3030u);
        }
        const float scale = half_to_float(raw.head[0] & 0xffffu);
        const float minimum = -half_to_float(raw.head[0] >> 16);
        out.scale[0] = out.scale[1] = scale * (float)(scales & 255u);
        out.scale[2] = out.scale[3] = scale * (float)(scales >> 8 & 255u);
        out.offset[0] = out.offset[1] = minimum * (float)(minima & 255u);
        out.offset[2] = out.offset[3] = minimum * (float)(minima >> 8 & 255u);
    }
};
template <int Columns>
struct Format<Q4_K, Columns> : BlocksWithMinima<Q4_K, Columns> {};
template <int Columns>
struct Format<Q5_K, Columns> : BlocksWithMinima<Q5_K, Columns> {};

// Half h of a block has 128 elements in four groups of 32. Unit 2h + k is 32 bytes of low bits: group k
// in the low nibbles, group k + 2 in the high ones.
template <int Columns>
struct Format<Q6_K, Columns> : RowLayout<Q6_K, Columns> {
    using Row = RowLayout<Q6_K, Columns>;
    using Names = Blocks<Q6_K>;
    static constexpr bool HAS_OFFSET = true, PAIRED = false, ADJACENT = true;
    struct Raw { u32 quants[8], high[8], scale; uint2 scales; };

    INLINE static int granule(int unit, int j) {
        return 16 * (unit / 4) + 8 * (unit / 2 % 2) + 2 * (unit % 2) + (j % 2) + 4 * (j / 2);
    }
    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        const int block = unit / 4, half = unit / 2 % 2;
        load32(raw.quants, Row::template at<Names::QUANTS>(row, block) + 32 * (unit % 4));
        load32(raw.high, Row::template at<Names::HIGH>(row, block) + 32 * half);
        raw.scales = load_weights8(Row::template at<Names::SCALES>(row, block) + 8 * half);
        raw.scale = load_weights2(Row::template at<Names::SCALE>(row, block));
    }
    INLINE static void unpack(Unpacked &out, const Raw &raw, int unit) {
        const int shift = 2 * (unit % 2);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 bits = raw.high[i] >> shift;
            out.q[i] = low_nibbles(raw.quants[i]) | (bits & 0x03030303u) << 4;
            out.q[8 + i] = high_nibbles(raw.quants[i]) | (bits & 0x30303030u);
        }
        // Of the half's eight scales: 2k and 2k + 1, and those of group k + 2.
        const float scale = half_to_float(raw.scale);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 scales = (j < 2 ? raw.scales.x : raw.scales.y) >> (8 * shift);
            out.scale[j] = scale * signed_byte(scales, j % 2);
            out.offset[j] = -32.0f * out.scale[j];
        }
    }
};

// Q2_K and Q3_K: element 32s + 16u + l of half h has its two low bits at bit 2s of byte 16u + l of the
// half's 32 bytes. Unit 2h + u is 16 of these bytes; granule j is s = j.
template <int Type, int Columns>
struct TwoBitBlocks : RowLayout<Type, Columns> {
    INLINE static int granule(int unit, int j) {
        return 16 * (unit / 4) + 8 * (unit / 2 % 2) + 2 * j + unit % 2;
    }
    INLINE static void unpack_pairs(u32 (&q)[16], const u32 (&quants)[4]) {
#pragma unroll
        for (int i = 0; i < 16; i++) q[i] = quants[i % 4] >> (2 * (i / 4)) & 0x03030303u;
    }
};

template <int Columns>
struct Format<Q2_K, Columns> : TwoBitBlocks<Q2_K, Columns> {
    using Row = RowLayout<Q2_K, Columns>;
    using Names = Blocks<Q2_K>;
    static constexpr bool HAS_OFFSET = true, PAIRED = false, ADJACENT = false;
    struct Raw { u32 quants[4], scale; uint2 scales; };

    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        const int block = unit / 4, half = unit / 2 % 2;
        put4(raw.quants,
             load_weights16(Row::template at<Names::QUANTS>(row, block) + 16 * (unit % 4)));
        raw.scales = load_weights8(Row::template at<Names::SCALES>(row, block) + 8 * half);
        raw.scale = load_weights4(Row::template at<Names::SCALE>(row, block));
    }
    // Byte 2j + u of the half's eight: the scale in the low nibble, the minimum in the high one.
    INLINE static void unpack(Unpacked &out, const Raw &raw, int unit) {
        Format::unpack_pairs(out.q, raw.quants);
        const float scale = half_to_float(raw.scale & 0xffffu);
        const float minimum = -half_to_float(raw.scale >> 16);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const u32 code = byte_of(j < 2 ? raw.scales.x : raw.scales.y, 2 * (j % 2) + unit % 2);
            out.scale[j] = scale * (float)(code & 15u);
            out.offset[j] = minimum * (float)(code >> 4);
        }
    }
};

template <int Columns>
struct Format<Q3_K, Columns> : TwoBitBlocks<Q3_K, Columns> {
    using Row = RowLayout<Q3_K, Columns>;
    using Names = Blocks<Q3_K>;
    static constexpr bool HAS_OFFSET = true, PAIRED = false, ADJACENT = false;
    struct Raw { u32 quants[4], high[4], scales[3], scale; };

    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        const int block = unit / 4;
        put4(raw.quants,
             load_weights16(Row::template at<Names::QUANTS>(row, block) + 16 * (unit % 4)));
        put4(raw.high, load_weights16(Row::template at<Names::HIGH>(row, block) + 16 * (unit % 2)));
        const u8 *scales = Row::template at<Names::SCALES>(row, block);
#pragma unroll
        for (int i = 0; i < 3; i++) raw.scales[i] = load_weights4(scales + 4 * i);
        raw.scale = load_weights2(Row::template at<Names::SCALE>(row, block));
    }
    // The third bit counts 4, and 4 is subtracted from every quant.
    INLINE static void unpack(Unpacked &out, const Raw &raw, int unit) {
        Format::unpack_pairs(out.q, raw.quants);
        const int half = unit / 2 % 2, u = unit % 2;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            out.q[i] |= (raw.high[i % 4] >> (4 * half + i / 4) & 0x01010101u) << 2;
        }
        const float scale = half_to_float(raw.scale);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // Scale 8h + 2j + u: four low bits, and two high bits from the last four bytes.
            const u32 low = byte_of(raw.scales[j / 2], 2 * (j % 2) + u) >> (4 * half) & 15u;
            const u32 high = byte_of(raw.scales[2], 2 * (j % 2) + u) >> (2 * (2 * half + j / 2)) & 3u;
            out.scale[j] = scale * (float)((int)(low | high << 4) - 32);
            out.offset[j] = -4.0f * out.scale[j];
        }
    }
};

// Eight sub-blocks of 32 elements with 6-bit scales; byte j of one holds elements j and j + 16.
template <int Columns>
struct Format<IQ4_XS, Columns> : RowLayout<IQ4_XS, Columns> {
    using Row = RowLayout<IQ4_XS, Columns>;
    using Names = Blocks<IQ4_XS>;
    static constexpr bool HAS_OFFSET = false, PAIRED = true, ADJACENT = true;
    struct Raw { u32 quants[8]; uint2 scales; };

    INLINE static int granule(int unit, int j) { return 4 * unit + j; }
    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        load32(raw.quants, Row::template at<Names::QUANTS>(row, unit / 4) + 32 * (unit % 4));
        raw.scales = load_weights8(Row::template at<Names::SCALES>(row, unit / 4));
    }
    INLINE static void unpack(Unpacked &out, const Raw &raw, int unit) {
        look_up_halves(out.q, raw.quants, iq4_table());
        const int p = unit % 4;
        const float scale = half_to_float(raw.scales.x & 0xffffu);
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const u32 low = raw.scales.y >> (8 * p + 4 * b) & 15u;
            const u32 high = raw.scales.x >> (16 + 4 * p + 2 * b) & 3u;
            set_block(out, b, scale * (float)((int)(low | high << 4) - 32), 0.0f);
        }
    }
};
