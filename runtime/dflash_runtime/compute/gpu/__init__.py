"""The GPU backend: kernels in CUDA/HIP C++, compiled at run time; CuPy holds the memory."""
