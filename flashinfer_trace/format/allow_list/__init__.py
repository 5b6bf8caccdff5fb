"""The Python that an embedded reference may use (`allowed`), and the check of its source (`static`), without torch."""
