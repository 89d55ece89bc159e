// Types with blocks of 32 elements, two per unit: Q4_0 to Q8_0, IQ4_NL and MXFP4; and NVFP4, whose
// block of 64 is one unit. Included by formats.cuh.
#pragma once

// Blocks of 16 bytes: byte j holds element j in its low nibble and element j + 16 in its high one.
template <int Type, int Columns>
struct PairOfBlocks : RowLayout<Type, Columns> {
    static constexpr bool PAIRED = true, ADJACENT = true;
    INLINE static int granule(int unit, int j) { return 4 * unit + j; }
};
// Granules 2b and 2b + 1 are the low and the high nibbles of the four words of block b.
INLINE void unpack_halves(u32 (&q)[16], const u32 (&quants)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        q[8 * (i / 4) + i % 4] = low_nibbles(quants[i]);
        q[8 * (i / 4) + 4 + i % 4] = high_nibbles(quants[i]);
    }
}
INLINE void look_up_halves(u32 (&q)[16], const u32 (&quants)[8], const NibbleTable &table) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        look_up(quants[i], table, q[8 * (i / 4) + i % 4], q[8 * (i / 4) + 4 + i % 4]);
    }
}
// Adds the fifth bits of block b; bit j belongs to element j.
INLINE void add_fifth_bits(u32 (&q)[16], int b, u32 bits) {
#pragma unroll
    for (int i = 0; i < 8; i++) q[8 * b + i] |= spread_bits(bits >> (4 * i)) << 4;
}
// Unsigned quants of four bits, or of five.
template <int Type, int Columns>
struct UnsignedBlocks : PairOfBlocks<Type, Columns> {
    using Row = RowLayout<Type, Columns>;
    static constexpr bool HAS_OFFSET = true, HAS_HIGH = Type == Q5_0 || Type == Q5_1;
    struct Quants { u32 low[8]; uint2 high; };

    INLINE static void load_quants(Quants &quants, const u8 *row, int unit) {
        load32(quants.low, Row::template at<Blocks<Type>::QUANTS>(row, 2 * unit));
        if constexpr (HAS_HIGH) quants.high = load_weights8(Row::template at<1>(row, 2 * unit));
    }
    INLINE static void unpack_quants(u32 (&q)[16], const Quants &quants) {
        unpack_halves(q, quants.low);
        if constexpr (HAS_HIGH) {
            add_fifth_bits(q, 0, quants.high.x);
            add_fifth_bits(q, 1, quants.high.y);
        }
    }
};
INLINE void set_block(Unpacked &out, int b, float scale, float offset) {
    out.scale[2 * b] = out.scale[2 * b + 1] = scale;
    out.offset[2 * b] = out.offset[2 * b + 1] = offset;
}

// Unsigned quants with a scale: scale * (quant - Zero).
template <int Type, int Columns, int Zero>
struct ScaledBlocks : UnsignedBlocks<Type, Columns> {
    using Base = UnsignedBlocks<Type, Columns>;
    struct Raw { typename Base::Quants quants; u32 scales; };

    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        Base::load_quants(raw.quants, row, unit);
        raw.scales = load_weights4(Base::Row::template at<Blocks<Type>::SCALE>(row, 2 * unit));
    }
    INLINE static void unpack(Unpacked &out, const Raw &raw, int) {
        Base::unpack_quants(out.q, raw.quants);
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const float scale = half_to_float(raw.scales >> (16 * b) & 0xffffu);
            set_block(out, b, scale, -(float)Zero * scale);
        }
    }
};
template <int Columns>
struct Format<Q4_0, Columns> : ScaledBlocks<Q4_0, Columns, 8> {};
template <int Columns>
struct Format<Q5_0, Columns> : ScaledBlocks<Q5_0, Columns, 16> {};

// Unsigned quants with a scale and a minimum: scale * quant + minimum.
template <int Type, int Columns>
struct BlocksWithMinimum : UnsignedBlocks<Type, Columns> {
    using Base = UnsignedBlocks<Type, Columns>;
    struct Raw { typename Base::Quants quants; uint2 scales; };

    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        Base::load_quants(raw.quants, row, unit);
        raw.scales = load_weights8(Base::Row::template at<Blocks<Type>::SCALE>(row, 2 * unit));
    }
    INLINE static void unpack(Unpacked &out, const Raw &raw, int) {
        Base::unpack_quants(out.q, raw.quants);
#pragma unroll
        for (int b = 0; b < 2; b++) {
            const u32 both = b ? raw.scales.y : raw.scales.x;
            set_block(out, b, half_to_float(both & 0xffffu), half_to_float(both >> 16));
        }
    }
};
template <int Columns>
struct Format<Q4_1, Columns> : BlocksWithMinimum<Q4_1, Columns> {};
template <int Columns>
struct Format<Q5_1, Columns> : BlocksWithMinimum<Q5_1, Columns> {};

template <int Columns>
struct Format<Q8_0, Columns> : PairOfBlocks<Q8_0, Columns> {
    using Row = RowLayout<Q8_0, Columns>;
    static constexpr bool HAS_OFFSET = false;
    struct Raw { u32 quants[16], scales; };

    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        const u8 *quants = Row::template at<Blocks<Q8_0>::QUANTS>(row, 2 * unit);
#pragma unroll
        for (int i = 0; i < 4; i++) put4(raw.quants + 4 * i, load_weights16(quants + 16 * i));
        raw.scales = load_weights4(Row::template at<Blocks<Q8_0>::SCALE>(row, 2 * unit));
    }
    INLINE static void unpack(Unpacked &out, const Raw &raw, int) {
#pragma unroll
        for (int i = 0; i < 16; i++) out.q[i] = raw.quants[i];
        set_block(out, 0, half_to_float(raw.scales & 0xffffu), 0.0f);
        set_block(out, 1, half_to_float(raw.scales >> 16), 0.0f);
    }
};

INLINE NibbleTable iq4_table() { return {{0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u}}; }
// E2M1 values times two, so that they are integers; scales are halved to match.
INLINE NibbleTable fp4_table() { return {{0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu}}; }

template <int Columns>
struct Format<IQ4_NL, Columns> : PairOfBlocks<IQ4_NL, Columns> {
    using Row = RowLayout<IQ4_NL, Columns>;
    static constexpr bool HAS_OFFSET = false;
    struct Raw { u32 quants[8], scales; };

    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        load32(raw.quants, Row::template at<Blocks<IQ4_NL>::QUANTS>(row, 2 * unit));
        raw.scales = load_weights4(Row::template at<Blocks<IQ4_NL>::SCALE>(row, 2 * unit));
    }
    INLINE static void unpack(Unpacked &out, const Raw &raw, int) {
        look_up_halves(out.q, raw.quants, iq4_table());
        set_block(out, 0, half_to_float(raw.scales & 0xffffu), 0.0f);
        set_block(out, 1, half_to_float(raw.scales >> 16), 0.0f);
    }
};

// 2^(exponent - 127) / 2; the two smallest are subnormal.
INLINE float half_power(u32 exponent) {
    return bits_to_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
}
template <int Columns>
struct Format<MXFP4, Columns> : PairOfBlocks<MXFP4, Columns> {
    using Row = RowLayout<MXFP4, Columns>;
    static constexpr bool HAS_OFFSET = false;
    struct Raw { u32 quants[8], scales; };

    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        load32(raw.quants, Row::template at<Blocks<MXFP4>::QUANTS>(row, 2 * unit));
        raw.scales = load_weights2(Row::template at<Blocks<MXFP4>::SCALE>(row, 2 * unit));
    }
    INLINE static void unpack(Unpacked &out, const Raw &raw, int) {
        look_up_halves(out.q, raw.quants, fp4_table());
        set_block(out, 0, half_power(byte_of(raw.scales, 0)), 0.0f);
        set_block(out, 1, half_power(byte_of(raw.scales, 1)), 0.0f);
    }
};

// Half of an unsigned E4M3 number; 0x7F counts as 0. Read as float16 its exponent is 8 too small.
INLINE float half_e4m3(u32 code) {
    return code == 0x7fu ? 0.0f : half_to_float((code & 0x7fu) << 7) * 128.0f;
}
template <int Columns>
struct Format<NVFP4, Columns> : RowLayout<NVFP4, Columns> {
    using Row = RowLayout<NVFP4, Columns>;
    static constexpr bool HAS_OFFSET = false, PAIRED = false, ADJACENT = true;
    struct Raw { u32 quants[8], scales; };

    INLINE static int granule(int unit, int j) { return 4 * unit + j; }
    INLINE static void load(Raw &raw, const u8 *row, int unit) {
        load32(raw.quants, Row::template at<Blocks<NVFP4>::QUANTS>(row, unit));
        raw.scales = load_weights4(Row::template at<Blocks<NVFP4>::SCALES>(row, unit));
    }
    // Granule j is eight bytes: their low nibbles, then their high nibbles.
    INLINE static void unpack(Unpacked &out, const Raw &raw, int) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int first = 4 * (i / 2) + i % 2;
            look_up(raw.quants[i], fp4_table(), out.q[first], out.q[first + 2]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out.scale[j] = half_e4m3(byte_of(raw.scales, j));
            out.offset[j] = 0.0f;
        }
    }
};
