"""Text that a trained model continues, token by token (`megarun sample`)."""
