"""Running a trained model: text generation, snapshots of a text's state, conversion of other checkpoints."""
