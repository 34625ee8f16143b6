"""The border to the user: events of the user's code, the public names, and TensorFlow's values among the user's."""
