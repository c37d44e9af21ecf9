"""What every layer and every model promises, run on every registered architecture and each of its variants."""
