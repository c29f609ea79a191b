"""Many quick cases as one test: a case of pytest's own costs more than what it computes."""

from collections.abc import Callable, Iterable


def every[T](cases: Iterable[T]) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Run a test of one argument with each case, as one test. A failure names its case."""
    cases = list(cases)
    assert cases

    def of_test(test: Callable[[T], None]) -> Callable[[], None]:
        def test_all() -> None:
            for case in cases:
                try:
                    test(case)
                except BaseException as error:
                    error.add_note(f"case: {case!r}")
                    raise

        test_all.__name__, test_all.__doc__ = test.__name__, test.__doc__
        return test_all

    return of_test
