"""The value analysis: which functions each call may enter."""
