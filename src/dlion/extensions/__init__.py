"""Extensions of the step: what PyTorch and bad days ask of an optimizer, one file each."""
