//! `gw-gateway backup` and `gw-gateway restore`.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use gw_gateway::backup::{self, BackupError};
use gw_gateway::store::StoreError;
use gw_shared::command::Failure;
use serde_json::json;

use super::connection::{AdminConnection, load_config};

/// Name of standard input and output.
const STANDARD: &str = "-";
/// Bytes of one read or write.
const CHUNK: usize = 64 * 1024;

#[derive(Args)]
pub(crate) struct BackupArguments {
    /// File to write (mode 0600), with private keys in it; - is standard output.
    file: PathBuf,
    /// Replace the file if it exists.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    connection: AdminConnection,
}

#[derive(Args)]
pub(crate) struct RestoreArguments {
    /// The backup; - is standard input.
    file: PathBuf,
    /// Configuration file of the gateway. Its data_dir must be empty or missing.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
}

impl BackupArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Self { file, force, connection } = self;
        if file == Path::new(STANDARD) {
            let mut out = BufWriter::with_capacity(CHUNK, io::stdout().lock());
            let done = copy(&connection, &mut out, Path::new("standard output"));
            return done.and_then(|()| out.flush().map_err(|error| Failure::Run(format!("standard output: {error}"))));
        }
        if !force && file.exists() {
            return Err(Failure::Usage(format!("{} exists; give another name, or --force", file.display())));
        }
        let failed = |error: io::Error| Failure::Run(format!("{}: {error}; no backup was made", file.display()));
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Has mode 0600, and is deleted on a failure.
        let mut new = tempfile::Builder::new().prefix(".gw-backup-").tempfile_in(folder).map_err(failed)?;
        copy(&connection, new.as_file_mut(), &file)?;
        new.as_file().sync_all().map_err(failed)?;
        let kept = if force { new.persist(&file) } else { new.persist_noclobber(&file) };
        let kept = kept.map_err(|error| failed(error.error))?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        let bytes = kept.metadata().map_err(failed)?.len();
        let name = file.display();
        let told = if connection.json() {
            writeln!(io::stdout(), "{}", json!({ "file": name.to_string(), "bytes": bytes }))
        } else {
            writeln!(io::stdout(), "Written: {name}, {bytes} bytes, with private keys in it. Encrypt copies of it.")
        };
        told.map_err(|error| Failure::Run(format!("standard output: {error}")))
    }
}

/// Writes the backup of a running gateway to `out`, or else that of the data folder of the configuration.
fn copy(connection: &AdminConnection, out: &mut impl Write, name: &Path) -> Result<(), Failure> {
    let written = |error: io::Error| Failure::Run(format!("{}: {error}; no backup was made", name.display()));
    match (connection.open_api()?.backup(), connection.config_file()) {
        (Ok(mut archive), _) => {
            let mut chunk = vec![0; CHUNK];
            loop {
                let read = archive.read(&mut chunk).map_err(|error| {
                    Failure::Run(format!(
                        "the gateway did not send the whole backup: {error}; no backup was made, try again"
                    ))
                })?;
                if read == 0 {
                    return Ok(());
                }
                out.write_all(&chunk[..read]).map_err(written)?;
            }
        }
        (Err(error), Some(config)) if error.is_connection_refused() => {
            let (config, refused) = (load_config(config, |name| std::env::var(name).ok())?, error);
            backup::of_folder(&config, out).map_err(|error| match error {
                BackupError::Output(error) => written(error),
                BackupError::Store(StoreError::InUse) => Failure::Run(format!(
                    "a gateway runs with {}, and its admin listener does not answer: {refused}",
                    config.data_dir.display()
                )),
                error => Failure::run(error),
            })
        }
        (Err(error), _) => Err(Failure::run(error)),
    }
}

impl RestoreArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Self { file, config: path } = self;
        let config = load_config(&path, |name| std::env::var(name).ok())?;
        let restored = if file == Path::new(STANDARD) {
            backup::restore(&config, io::stdin().lock())
        } else {
            let input = File::open(&file).map_err(|error| Failure::Usage(format!("{}: {error}", file.display())))?;
            backup::restore(&config, BufReader::with_capacity(CHUNK, input))
        };
        let restored = restored.map_err(|error| match error {
            BackupError::NotEmpty { .. } | BackupError::InPostgres => Failure::Usage(error.to_string()),
            error => Failure::run(error),
        })?;
        let backup::Restored { manifest, records } = restored;
        let told = writeln!(
            io::stdout(),
            "Restored {records} records of {}, up to change {}, of {}, into {}.\nStart it: gw-gateway serve --config {}",
            manifest.region,
            manifest.revision,
            manifest.created_at,
            config.data_dir.display(),
            path.display()
        );
        told.map_err(|error| Failure::Run(format!("standard output: {error}")))
    }
}
