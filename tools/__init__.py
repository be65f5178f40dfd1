"""Scripts of the repository: what the address of the project fills, and the site's hooks."""
