"""What every other part may use: files, random states, texts, walks of nested values."""
