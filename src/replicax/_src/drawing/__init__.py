"""Tables and pictures as HTML and SVG."""
