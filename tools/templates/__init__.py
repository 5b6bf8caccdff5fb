"""The templates of an installed FlashInfer, and what the oracles here say of their references."""
