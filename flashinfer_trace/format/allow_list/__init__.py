"""What an embedded reference may use (`allowed`), and the check of its source (`static`). No torch is needed."""
