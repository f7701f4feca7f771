"""All code that runs inside the training script. Standard library until torch is imported."""
