"""The virtual GPU's dispatch of operators: shapes, known values, special kernels, and operators that run on the host."""
