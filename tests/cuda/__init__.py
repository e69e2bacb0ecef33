"""The CUDA path of the library on pretended tensors, where there is no GPU."""
