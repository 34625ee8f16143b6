"""``ParameterServerStrategy``: functions traced for workers and servers."""
