"""The files of a new family, with what is left to be written marked TODO."""
