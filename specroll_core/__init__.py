"""The mathematics of SpecRoll: no I/O, and nothing imported but torch and the standard library."""
