"""What several tools build on: Markdown, and the packages that sources are made of."""
