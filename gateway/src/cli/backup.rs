//! `gw-gateway backup` and `gw-gateway restore`.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use gw_control_plane::backup::{self, BackupError};
use gw_interface::config::StoreSettings;
use gw_shared::command::Failure;
use gw_shared::files::cannot_read;
use gw_shared::text::escaped;
use gw_store::{StoreError, StoreSource};
use serde_json::json;

use super::client::api::ApiError;
use super::client::connection::{AdminConnection, load_config};
use super::interrupt::Interrupt;

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

const NOT_MADE: &str = "no backup was made";
const NOT_RESTORED: &str = "nothing was restored";

impl BackupArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let interrupt = Interrupt::listen()?;
        if self.file == Path::new(STANDARD) {
            let mut out = BufWriter::with_capacity(CHUNK, io::stdout().lock());
            let name = Path::new("standard output");
            copy(&self.connection, &mut out, name, &interrupt)?;
            return out.flush().map_err(|error| not_written(&error));
        }
        let bytes = self.write_file(&interrupt)?;
        let name = self.file.display();
        let told = if self.connection.json() {
            json!({ "file": name.to_string(), "bytes": bytes }).to_string()
        } else {
            format!(
                "Written: {name}, {bytes} bytes, with private keys in it. Encrypt copies of it."
            )
        };
        writeln!(io::stdout(), "{told}").map_err(|error| not_written(&error))
    }

    /// Writes the backup to the file; returns its length in bytes.
    fn write_file(&self, interrupt: &Interrupt) -> Result<u64, Failure> {
        let Self {
            file,
            force,
            connection,
        } = self;
        if fs::symlink_metadata(file).is_ok_and(|found| !found.is_file()) {
            // It would be replaced, not written to.
            return Err(Failure::Usage(format!(
                "{} is not a regular file; give another name, or - for standard output",
                file.display()
            )));
        }
        if !force && file.exists() {
            return Err(Failure::Usage(format!(
                "{} exists; give another name, or --force",
                file.display()
            )));
        }
        let failed =
            |error: io::Error| Failure::Run(format!("{}: {error}; {NOT_MADE}", file.display()));
        let folder = file
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        // Has mode 0600, and is deleted on a failure.
        let mut new = tempfile::Builder::new()
            .prefix(".gw-backup-")
            .tempfile_in(folder)
            .map_err(|error| not_created(file, folder, &error))?;
        copy(connection, new.as_file_mut(), file, interrupt)?;
        new.as_file().sync_all().map_err(failed)?;
        let kept = if *force {
            new.persist(file)
        } else {
            new.persist_noclobber(file)
        };
        let kept = kept.map_err(|error| failed(error.error))?;
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(failed)?;
        Ok(kept.metadata().map_err(failed)?.len())
    }
}

/// The failure of a file that cannot be created in its folder.
fn not_created(file: &Path, folder: &Path, error: &io::Error) -> Failure {
    let file = file.display();
    let folder = folder.display();
    Failure::Run(match error.kind() {
        io::ErrorKind::NotFound => {
            format!(
                "{file}: the folder {folder} does not exist; make it, or name another file; \
                 {NOT_MADE}"
            )
        }
        io::ErrorKind::PermissionDenied => format!(
            "{file}: user {} may not write to {folder}; name another file; {NOT_MADE}",
            rustix::process::geteuid().as_raw()
        ),
        _ => format!("{file}: {error}; {NOT_MADE}"),
    })
}

fn not_written(error: &io::Error) -> Failure {
    Failure::Run(format!("standard output: {error}"))
}

/// Writes the backup of a running gateway to `out`, or else that of the data folder of the
/// configuration.
fn copy(
    connection: &AdminConnection,
    out: &mut impl Write,
    name: &Path,
    interrupt: &Interrupt,
) -> Result<(), Failure> {
    if let Some(path) = connection.own_config_file() {
        check_records(path)?;
    }
    let mut out = interrupt.writer(out);
    let written =
        |error: io::Error| Failure::Run(format!("{}: {error}; {NOT_MADE}", name.display()));
    let copied = match (
        download(connection, &mut out, written, interrupt),
        connection.own_config_file(),
    ) {
        (Ok(Err(refused)), Some(config)) if refused.is_connection_refused() => {
            load_config(config, |name| std::env::var(name).ok()).and_then(|config| {
                backup::of_folder(&config, &mut out, &|| interrupt.is_set()).map_err(
                |error| match error {
                    BackupError::Output(error) => written(error),
                    BackupError::Store(StoreError::InUse) => Failure::Run(format!(
                        "a gateway runs with {}, and its admin listener does not answer: {refused}",
                        config.data_dir.display()
                    )),
                    error => Failure::Run(format!("{error}; {NOT_MADE}")),
                },
            )
            })
        }
        (Ok(Err(error)), _) => Err(Failure::run(error)),
        (Ok(Ok(())), _) => Ok(()),
        (Err(failure), _) => Err(failure),
    };
    copied.map_err(|failure| interrupt.explain(failure, NOT_MADE))
}

/// Checks that a gateway with this configuration file has been started: otherwise there is neither
/// a token for its API nor anything to back up.
fn check_records(path: &Path) -> Result<(), Failure> {
    let config = load_config(path, |name| std::env::var(name).ok())?;
    let database = StoreSource::sqlite_in(&config.data_dir);
    let is_missing = |error: io::Error| error.kind() == io::ErrorKind::NotFound;
    // PostgreSQL, and a folder that this user cannot enter, are reported further on.
    if matches!(config.store, StoreSettings::Postgres(_))
        || !fs::metadata(&database).is_err_and(is_missing)
    {
        return Ok(());
    }
    Err(Failure::Run(format!(
        "{}: it does not exist: no gateway with {} was ever started, so there are no records; name \
         the configuration of the gateway with --config; {NOT_MADE}",
        database.display(),
        path.display()
    )))
}

/// Writes the backup of a running gateway. The inner error is that of its API.
fn download(
    connection: &AdminConnection,
    out: &mut impl Write,
    written: impl Fn(io::Error) -> Failure,
    interrupt: &Interrupt,
) -> Result<Result<(), ApiError>, Failure> {
    let api = connection.open_api()?;
    let mut archive = match interrupt.open(move || api.backup()).map_err(Failure::run)? {
        Ok(archive) => archive,
        Err(error) => return Ok(Err(error)),
    };
    let mut chunk = vec![0; CHUNK];
    loop {
        let read = archive.read(&mut chunk).map_err(|error| {
            Failure::Run(format!(
                "the gateway did not send the whole backup: {error}; {NOT_MADE}, try again"
            ))
        })?;
        if read == 0 {
            return Ok(Ok(()));
        }
        out.write_all(&chunk[..read]).map_err(&written)?;
    }
}

impl RestoreArguments {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let Self { file, config: path } = self;
        let interrupt = Interrupt::listen()?;
        let config = load_config(&path, |name| std::env::var(name).ok())?;
        let source = file.clone();
        let open = move || -> io::Result<Box<dyn Read>> {
            if source == Path::new(STANDARD) {
                return Ok(Box::new(io::stdin().lock()));
            }
            Ok(Box::new(File::open(source)?))
        };
        let input = interrupt.open(open).and_then(|opened| opened);
        let input = input.map_err(|error| Failure::Usage(cannot_read(&file, &error)))?;
        let restored = backup::restore(&config, input, &|| interrupt.is_set()).map_err(
            |error| match error {
                BackupError::NotEmpty { .. } | BackupError::InPostgres => {
                    Failure::Usage(error.to_string())
                }
                error @ (BackupError::Damaged(_)
                | BackupError::Refused(_)
                | BackupError::OtherRegion { .. }) => interrupt.explain(
                    Failure::Run(format!("{}: {error}; {NOT_RESTORED}", file.display())),
                    NOT_RESTORED,
                ),
                error => interrupt.explain(
                    Failure::Run(format!("{error}; {NOT_RESTORED}")),
                    NOT_RESTORED,
                ),
            },
        )?;
        let backup::Restored {
            manifest,
            records,
            deleted,
        } = restored;
        let deleted: String = deleted
            .iter()
            .map(|(count, notice)| format!("\nDeleted {count} {notice}"))
            .collect();
        let told = writeln!(
            io::stdout(),
            "Restored {records} records of {}, up to change {}, of {}, into {}.{deleted}\nStart \
             it: gw-gateway serve --config {}",
            escaped(&manifest.region),
            manifest.revision,
            escaped(&manifest.created_at),
            config.data_dir.display(),
            path.display()
        );
        told.map_err(|error| not_written(&error))
    }
}
