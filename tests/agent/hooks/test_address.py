"""Addresses of loaders: equal from run to run, different for different sites."""

import sys

from flatout.agent.hooks.loader import AddressBook


def build(book):
    return book.name(sys._getframe(1))


def test_two_sites_in_one_function_differ():
    book = AddressBook()

    def main():
        return build(book), build(book)

    train, test = main()
    assert train != test
    assert train.startswith("test_address.py:main<")


def test_one_site_used_again_keeps_its_address():
    book = AddressBook()

    addresses = {build(book) for _ in range(3)}

    assert len(addresses) == 1


def test_callers_tell_one_construction_line_apart():
    book = AddressBook()

    def make():
        return build(book)

    def train():
        return make()

    def evaluate():
        return make()

    assert train() != evaluate()
