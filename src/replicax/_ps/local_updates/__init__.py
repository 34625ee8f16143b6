"""Groups that train alone and exchange what they learned through parameter servers (Decoupled DiLoCo).

The rules are pure: no sockets, threads, clocks or arrays.
"""
