"""torchtitan: FSDP2 of transformer blocks, in the terms of the families and of megarun's replay."""
