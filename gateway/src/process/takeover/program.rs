//! The program and the arguments of this process, to start a successor with.

use std::ffi::OsString;
use std::path::Path;

/// Command line of this process.
#[derive(Debug, Clone)]
pub struct Program {
    /// Path that this process was started with. The file there may have been replaced since.
    pub(super) name: OsString,
    pub(super) arguments: Vec<OsString>,
}

impl Program {
    pub fn of_this_process() -> Self {
        let mut arguments = std::env::args_os();
        let name = arguments
            .next()
            .unwrap_or_else(|| env!("CARGO_PKG_NAME").into());
        Self {
            name,
            arguments: arguments.collect(),
        }
    }

    /// This program with the arguments that serve `config`, whatever those of this process are.
    pub fn serving(config: &Path) -> Self {
        let arguments = vec!["serve".into(), "--config".into(), config.into()];
        Self {
            arguments,
            ..Self::of_this_process()
        }
    }
}
