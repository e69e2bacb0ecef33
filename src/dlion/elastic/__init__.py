"""Workers that come and go during training, with torchft."""
