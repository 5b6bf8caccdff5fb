"""What several tools build on: JSON and Markdown texts, and the packages that sources are made of."""
