// The table of launch/layouts.py, as device_layout.py of the tests writes it.
#pragma once

// Types of weights: the ids of the file format.
enum WeightType {
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    MXFP4 = 39,
    NVFP4 = 40,
    F32 = 0,
    F16 = 1,
    BF16 = 30,
};

// Elements and bytes of the file's blocks, and what the fields of a row are called.
template <int Type> struct Blocks;
// A field's offset in the file's block, and its bytes.
template <int Type, int Index> struct Field;

template <> struct Blocks<Q4_0> {
    static constexpr int ELEMENTS = 32, BYTES = 18;
    static constexpr int QUANTS = 0, SCALE = 1, NUM_FIELDS = 2;
};
template <> struct Field<Q4_0, 0> { static constexpr int OFFSET = 2, BYTES = 16; };
template <> struct Field<Q4_0, 1> { static constexpr int OFFSET = 0, BYTES = 2; };
template <> struct Blocks<Q4_1> {
    static constexpr int ELEMENTS = 32, BYTES = 20;
    static constexpr int QUANTS = 0, SCALE = 1, NUM_FIELDS = 2;
};
template <> struct Field<Q4_1, 0> { static constexpr int OFFSET = 4, BYTES = 16; };
template <> struct Field<Q4_1, 1> { static constexpr int OFFSET = 0, BYTES = 4; };
template <> struct Blocks<Q5_0> {
    static constexpr int ELEMENTS = 32, BYTES = 22;
    static constexpr int QUANTS = 0, HIGH = 1, SCALE = 2, NUM_FIELDS = 3;
};
template <> struct Field<Q5_0, 0> { static constexpr int OFFSET = 6, BYTES = 16; };
template <> struct Field<Q5_0, 1> { static constexpr int OFFSET = 2, BYTES = 4; };
template <> struct Field<Q5_0, 2> { static constexpr int OFFSET = 0, BYTES = 2; };
template <> struct Blocks<Q5_1> {
    static constexpr int ELEMENTS = 32, BYTES = 24;
    static constexpr int QUANTS = 0, HIGH = 1, SCALE = 2, NUM_FIELDS = 3;
};
template <> struct Field<Q5_1, 0> { static constexpr int OFFSET = 8, BYTES = 16; };
template <> struct Field<Q5_1, 1> { static constexpr int OFFSET = 4, BYTES = 4; };
template <> struct Field<Q5_1, 2> { static constexpr int OFFSET = 0, BYTES = 4; };
template <> struct Blocks<Q8_0> {
    static constexpr int ELEMENTS = 32, BYTES = 34;
    static constexpr int QUANTS = 0, SCALE = 1, NUM_FIELDS = 2;
};
template <> struct Field<Q8_0, 0> { static constexpr int OFFSET = 2, BYTES = 32; };
template <> struct Field<Q8_0, 1> { static constexpr int OFFSET = 0, BYTES = 2; };
template <> struct Blocks<Q2_K> {
    static constexpr int ELEMENTS = 256, BYTES = 84;
    static constexpr int QUANTS = 0, SCALES = 1, SCALE = 2, NUM_FIELDS = 3;
};
template <> struct Field<Q2_K, 0> { static constexpr int OFFSET = 16, BYTES = 64; };
template <> struct Field<Q2_K, 1> { static constexpr int OFFSET = 0, BYTES = 16; };
template <> struct Field<Q2_K, 2> { static constexpr int OFFSET = 80, BYTES = 4; };
template <> struct Blocks<Q3_K> {
    static constexpr int ELEMENTS = 256, BYTES = 110;
    static constexpr int QUANTS = 0, HIGH = 1, SCALES = 2, SCALE = 3, NUM_FIELDS = 4;
};
template <> struct Field<Q3_K, 0> { static constexpr int OFFSET = 32, BYTES = 64; };
template <> struct Field<Q3_K, 1> { static constexpr int OFFSET = 0, BYTES = 32; };
template <> struct Field<Q3_K, 2> { static constexpr int OFFSET = 96, BYTES = 12; };
template <> struct Field<Q3_K, 3> { static constexpr int OFFSET = 108, BYTES = 2; };
template <> struct Blocks<Q4_K> {
    static constexpr int ELEMENTS = 256, BYTES = 144;
    static constexpr int BLOCK = 0, NUM_FIELDS = 1;
};
template <> struct Field<Q4_K, 0> { static constexpr int OFFSET = 0, BYTES = 144; };
template <> struct Blocks<Q5_K> {
    static constexpr int ELEMENTS = 256, BYTES = 176;
    static constexpr int BLOCK = 0, NUM_FIELDS = 1;
};
template <> struct Field<Q5_K, 0> { static constexpr int OFFSET = 0, BYTES = 176; };
template <> struct Blocks<Q6_K> {
    static constexpr int ELEMENTS = 256, BYTES = 210;
    static constexpr int QUANTS = 0, HIGH = 1, SCALES = 2, SCALE = 3, NUM_FIELDS = 4;
};
template <> struct Field<Q6_K, 0> { static constexpr int OFFSET = 0, BYTES = 128; };
template <> struct Field<Q6_K, 1> { static constexpr int OFFSET = 128, BYTES = 64; };
template <> struct Field<Q6_K, 2> { static constexpr int OFFSET = 192, BYTES = 16; };
template <> struct Field<Q6_K, 3> { static constexpr int OFFSET = 208, BYTES = 2; };
template <> struct Blocks<IQ4_NL> {
    static constexpr int ELEMENTS = 32, BYTES = 18;
    static constexpr int QUANTS = 0, SCALE = 1, NUM_FIELDS = 2;
};
template <> struct Field<IQ4_NL, 0> { static constexpr int OFFSET = 2, BYTES = 16; };
template <> struct Field<IQ4_NL, 1> { static constexpr int OFFSET = 0, BYTES = 2; };
template <> struct Blocks<IQ4_XS> {
    static constexpr int ELEMENTS = 256, BYTES = 136;
    static constexpr int QUANTS = 0, SCALES = 1, NUM_FIELDS = 2;
};
template <> struct Field<IQ4_XS, 0> { static constexpr int OFFSET = 8, BYTES = 128; };
template <> struct Field<IQ4_XS, 1> { static constexpr int OFFSET = 0, BYTES = 8; };
template <> struct Blocks<MXFP4> {
    static constexpr int ELEMENTS = 32, BYTES = 17;
    static constexpr int QUANTS = 0, SCALE = 1, NUM_FIELDS = 2;
};
template <> struct Field<MXFP4, 0> { static constexpr int OFFSET = 1, BYTES = 16; };
template <> struct Field<MXFP4, 1> { static constexpr int OFFSET = 0, BYTES = 1; };
template <> struct Blocks<NVFP4> {
    static constexpr int ELEMENTS = 64, BYTES = 36;
    static constexpr int QUANTS = 0, SCALES = 1, NUM_FIELDS = 2;
};
template <> struct Field<NVFP4, 0> { static constexpr int OFFSET = 4, BYTES = 32; };
template <> struct Field<NVFP4, 1> { static constexpr int OFFSET = 0, BYTES = 4; };
template <> struct Blocks<F32> {
    static constexpr int ELEMENTS = 1, BYTES = 4;
    static constexpr int VALUES = 0, NUM_FIELDS = 1;
};
template <> struct Field<F32, 0> { static constexpr int OFFSET = 0, BYTES = 4; };
template <> struct Blocks<F16> {
    static constexpr int ELEMENTS = 1, BYTES = 2;
    static constexpr int VALUES = 0, NUM_FIELDS = 1;
};
template <> struct Field<F16, 0> { static constexpr int OFFSET = 0, BYTES = 2; };
template <> struct Blocks<BF16> {
    static constexpr int ELEMENTS = 1, BYTES = 2;
    static constexpr int VALUES = 0, NUM_FIELDS = 1;
};
template <> struct Field<BF16, 0> { static constexpr int OFFSET = 0, BYTES = 2; };
