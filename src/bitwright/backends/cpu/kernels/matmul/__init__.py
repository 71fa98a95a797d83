"""Matrix products: selection and emission of kernels."""
