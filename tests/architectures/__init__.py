"""What single architectures promise beyond the contract of all."""
