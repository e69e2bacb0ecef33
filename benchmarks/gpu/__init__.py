"""The parts of accelerator.py: kernels, steps, training, exchanges, and how they are timed."""
