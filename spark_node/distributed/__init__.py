"""Several ranks (torchrun): one peer over several GPUs, or a whole network in memory over many processes."""
