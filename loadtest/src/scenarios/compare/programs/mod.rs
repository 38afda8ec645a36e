//! Programs of others that the comparison starts.

pub(super) mod h2load;
pub(super) mod perf;
pub(super) mod rathole;
pub(super) mod wrk;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::failure::Failure;

/// Names of programs, with their versions.
pub(super) type Versions = BTreeMap<String, String>;

/// The version that a program prints with this option.
pub(super) fn version(program: &Path, option: &str) -> Result<String, Failure> {
    let failed = |error| Failure::during(program.display(), error);
    // wrk ends with another code than 0, and nginx prints it as an error.
    let output = Command::new(program).arg(option).output().map_err(failed)?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let version = version_in(&text).map(str::to_owned);
    version.ok_or_else(|| Failure::new(format!("{} {option}: {text}", program.display())))
}

/// The first word that begins with a digit and has a dot.
fn version_in(text: &str) -> Option<&str> {
    let is_version =
        |word: &&str| word.starts_with(|it: char| it.is_ascii_digit()) && word.contains('.');
    text.split([' ', '/', '\n']).find(is_version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found() {
        for (text, version) in [
            (
                "HAProxy version 2.6.12-1+deb12u1 2023/12/16 - https://haproxy.org/\n",
                "2.6.12-1+deb12u1",
            ),
            ("nginx version: nginx/1.22.1\n", "1.22.1"),
            (
                "wrk debian/4.1.0-3 [epoll] Copyright (C) 2012 Will Glozer\n",
                "4.1.0-3",
            ),
            ("h2load nghttp2/1.52.0\n", "1.52.0"),
            ("gw-gateway 0.2.0\n", "0.2.0"),
        ] {
            assert_eq!(version_in(text), Some(version));
        }
        assert_eq!(version_in("usage: 1 file\n"), None);
    }
}
