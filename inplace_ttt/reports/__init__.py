"""What reports share: pages from templates, pictures of evidence, means with their errors."""
