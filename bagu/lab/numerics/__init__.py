"""Labs about numbers: softmax, quantization, the order of sums, arrays."""
