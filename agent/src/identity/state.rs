//! The agent's state folder: its identity and the address of its gateway. Written by `enroll`,
//! updated by `run`.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use gw_shared::doctor::holder::Holder;
use gw_shared::files;
use gw_shared::id::{AgentId, EnrollmentId, EnrollmentTokenId};
use gw_shared::identity::enrollment::{InvalidServices, check_services};
use gw_shared::net::tls::pem;
use gw_shared::version::later_members::LaterMembers;
use rustix::fs::StatVfsMountFlags;
use rustls_pki_types::CertificateDer;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::identity::certificate::{Identity, UnfitIdentity};

/// Default path of the state folder.
pub const DEFAULT: &str = "/var/lib/gw-agent";

/// Environment variable that overrides [`DEFAULT`].
pub const VARIABLE: &str = "GW_STATE_DIR";

/// `agent.json`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrollment {
    pub agent_id: AgentId,
    /// Host name of the region's apex.
    pub gateway_name: String,
    /// Host and port to connect to, for the apex and tunnels.
    pub gateway_host: String,
    pub gateway_port: u16,
    /// Hostnames of the services that this agent serves.
    pub services: Vec<String>,
    #[serde(flatten)]
    pub later: LaterMembers,
}

/// `enrollment.json`: an unfinished enrollment. Not `Debug`, because it holds secrets.
#[derive(Serialize, Deserialize)]
pub(crate) struct PendingEnrollment {
    pub(crate) gateway_name: String,
    pub(crate) gateway_host: String,
    pub(crate) gateway_port: u16,
    /// Content of `gateway-ca.crt` once enrolled.
    pub(crate) gateway_ca_pem: Option<String>,
    /// Public part of the token that it began with.
    pub(crate) token_id: EnrollmentTokenId,
    pub(crate) enrollment_id: EnrollmentId,
    /// The id under which administrators see the agent.
    #[serde(default)]
    pub(crate) agent_id: Option<AgentId>,
    pub(crate) enrollment_secret: String,
    pub(crate) key_pem: String,
    #[serde(flatten)]
    pub(crate) later: LaterMembers,
}

/// The files of a state folder (mode 0700, files 0600). Each is replaced as a whole.
#[derive(Debug, Clone)]
pub struct StateDir(PathBuf);

/// Exclusive lock of a state folder, released on drop.
#[derive(Debug)]
pub(crate) struct StateLock {
    /// `None` on a file system without locks.
    folder: Option<File>,
}

impl Drop for StateLock {
    fn drop(&mut self) {
        // Closing the file is not enough: a child process that another thread is starting has a
        // copy of it until exec, and the lock lasts as long as any copy (flock(2)).
        if let Some(Err(error)) = self.folder.as_ref().map(File::unlock) {
            tracing::debug!(%error,
                "cannot unlock the state folder; it is unlocked when its last file descriptor is \
                 closed");
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("{path}: {error}")]
    Io { path: String, error: io::Error },
    #[error(
        "{path}: permission denied: this process runs as user {user}, and {folder} belongs to user \
         {owner} (mode {mode:04o}); {}",
        permission_remedy(*.user == *.owner)
    )]
    Permission {
        path: String,
        folder: String,
        user: u32,
        owner: u32,
        mode: u32,
    },
    /// There is no agent in the folder.
    #[error(
        "not enrolled: {path} does not exist; run `gw-agent enroll` with a token from the \
         gateway's administrator (for the unit of the package, `systemctl start gw-agent-enroll`)"
    )]
    NotEnrolled { path: String },
    #[error(
        "{path}: {error}; that user could replace what this process reads: run gw-agent as the \
         owner, such as `sudo -u '#{}' gw-agent …`, or choose another folder with \
         --state-dir", .error.owner
    )]
    Owner { path: String, error: OtherOwner },
    #[error(
        "{path} is damaged ({error}): delete it, and enroll again with a new token and `gw-agent \
         enroll --force`"
    )]
    Json {
        path: String,
        error: serde_json::Error,
    },
    #[error("{path}: {error}; replace the agent with `gw-agent enroll --force`")]
    Services {
        path: String,
        error: InvalidServices,
    },
    #[error("{path}: {error}")]
    Pem { path: String, error: String },
    #[error(
        "{path}: {error}; enroll the agent again with a new token and `gw-agent enroll --force`"
    )]
    Identity { path: String, error: UnfitIdentity },
    #[error(
        "{path} does not exist, and with it the key of this agent is lost; enroll the agent again \
         with a new token and `gw-agent enroll --force`"
    )]
    NoIdentity { path: String },
    #[error("{path} is not a folder; choose another one with --state-dir")]
    NotAFolder { path: String },
    #[error(
        "{path} is in use by another gw-agent process{}, `run` or `enroll`: stop that process \
         first; a second agent needs its own folder (--state-dir) and enrollment",
        pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
    )]
    InUse { path: String, pid: Option<u32> },
}

fn permission_remedy(is_owner: bool) -> &'static str {
    if is_owner {
        "`chmod 700` it, or choose another folder with --state-dir"
    } else {
        "run gw-agent as that user, such as `sudo -u gw-agent gw-agent …`, or choose another \
         folder with --state-dir"
    }
}

/// A file or folder that another user could change.
#[derive(Debug, thiserror::Error)]
#[error("it belongs to user {owner}, and this process runs as user {user}")]
pub struct OtherOwner {
    user: u32,
    owner: u32,
}

/// Checks that a file or folder belongs to the user of this process, or to root, which has the
/// rights of every user. Volumes of Kubernetes belong to root.
pub(crate) fn check_owner(about: &Metadata) -> Result<(), OtherOwner> {
    let user = rustix::process::geteuid().as_raw();
    let owner = about.uid();
    if owner == user || owner == 0 {
        Ok(())
    } else {
        Err(OtherOwner { user, owner })
    }
}

impl StateError {
    /// Names the users where permission is denied.
    fn io(path: &Path, error: io::Error) -> Self {
        let path_of = name(path);
        if error.kind() != io::ErrorKind::PermissionDenied {
            return Self::Io {
                path: path_of,
                error,
            };
        }
        // The nearest folder or file that this process can see decides.
        let seen = path
            .ancestors()
            .find_map(|it| Some((it, fs::metadata(it).ok()?)));
        let Some((seen, about)) = seen else {
            return Self::Io {
                path: path_of,
                error,
            };
        };
        let user = rustix::process::geteuid().as_raw();
        let owner = about.uid();
        let mode = about.mode() & 0o7777;
        Self::Permission {
            path: path_of,
            folder: name(seen),
            user,
            owner,
            mode,
        }
    }
}

const ENROLLMENT: &str = "agent.json";
const PENDING: &str = "enrollment.json";
/// Size of a file that shows that the disk has space for an enrollment, in bytes.
const PROBE_BYTES: usize = 64 * 1024;
/// Holds private key and certificates in one file, so that a crash cannot leave a key and
/// certificates that do not match.
const IDENTITY: &str = "identity.pem";
const GATEWAY_CA: &str = "gateway-ca.crt";
/// URL of the backend of the last `gw-agent http` that ran with the folder, for `doctor`.
const HTTP_BACKEND: &str = "http-backend";

impl StateDir {
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Creates the folder unless it exists, and checks that it is writable.
    pub(crate) fn create(&self) -> Result<(), StateError> {
        if fs::metadata(&self.0).is_ok_and(|about| !about.is_dir()) {
            return Err(StateError::NotAFolder {
                path: name(&self.0),
            });
        }
        let created = files::create_private_dir(&self.0);
        created.map_err(|error| StateError::io(&self.0, error))?;
        self.replace("probe", &[0; PROBE_BYTES])?;
        self.remove("probe")
    }

    /// Locks the folder, or fails if another process has locked it: two processes with one identity
    /// would replace each other's tunnels. The kernel releases the lock however the process ends.
    /// Writes nothing. A folder of another user is refused.
    pub(crate) fn lock(&self) -> Result<StateLock, StateError> {
        let folder = File::open(&self.0).map_err(|error| StateError::io(&self.0, error))?;
        let about = folder
            .metadata()
            .map_err(|error| StateError::io(&self.0, error))?;
        check_owner(&about).map_err(|error| StateError::Owner {
            path: name(&self.0),
            error,
        })?;
        match folder.try_lock() {
            Ok(()) => Ok(StateLock {
                folder: Some(folder),
            }),
            Err(TryLockError::WouldBlock) => {
                let holder = folder
                    .metadata()
                    .ok()
                    .and_then(|folder| Holder::of_lock(&folder));
                Err(StateError::InUse {
                    path: name(&self.0),
                    pid: holder.map(|holder| holder.id),
                })
            }
            Err(TryLockError::Error(error)) => {
                tracing::warn!(folder = %self.0.display(), %error,
                    "the state folder cannot be locked; make sure that only one agent uses it");
                Ok(StateLock { folder: None })
            }
        }
    }

    pub fn enrollment(&self) -> Result<Enrollment, StateError> {
        let enrollment: Enrollment = self.read_json(ENROLLMENT).map_err(|error| match error {
            StateError::Io { path, error } if error.kind() == io::ErrorKind::NotFound => {
                StateError::NotEnrolled { path }
            }
            error => error,
        })?;
        // An agent of an earlier version has stored what a gateway sent.
        check_services(&enrollment.services, &enrollment.gateway_name).map_err(|error| {
            StateError::Services {
                path: name(&self.0.join(ENROLLMENT)),
                error,
            }
        })?;
        Ok(enrollment)
    }

    /// Whether there is an agent in the folder.
    pub fn is_enrolled(&self) -> bool {
        self.0.join(ENROLLMENT).exists()
    }

    pub(crate) fn write_enrollment(&self, enrollment: &Enrollment) -> Result<(), StateError> {
        self.write_json(ENROLLMENT, enrollment)
    }

    /// Reads the identity. Renewal replaces the file while the agent runs.
    pub fn identity(&self) -> Result<Identity, StateError> {
        let path = self.0.join(IDENTITY);
        let text = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => StateError::NoIdentity { path: name(&path) },
            _ => StateError::io(&path, error),
        })?;
        Identity::from_pem(&text).map_err(|error| StateError::Identity {
            path: name(&path),
            error,
        })
    }

    /// As [`Self::identity`], with the file and its name on the disk, so that a crash of the
    /// machine does not bring back the identity before it. The file with the certificate `durable`
    /// is known to be there.
    pub(crate) fn durable_identity(
        &self,
        durable: Option<&CertificateDer<'_>>,
    ) -> Result<Identity, StateError> {
        let path = self.0.join(IDENTITY);
        let failed = |error| StateError::io(&path, error);
        let mut file = File::open(&path).map_err(failed)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(failed)?;
        let identity = Identity::from_pem(&text).map_err(|error| StateError::Identity {
            path: name(&path),
            error,
        })?;
        if durable != Some(&identity.certificate) {
            self.sync(&file).map_err(|error| {
                let message = format!(
                    "cannot make sure that the file is on the disk: {error}; not used until it is"
                );
                failed(io::Error::new(error.kind(), message))
            })?;
        }
        Ok(identity)
    }

    /// Waits until a file of the folder and its name are on the disk.
    fn sync(&self, file: &File) -> io::Result<()> {
        // A file system that is mounted read-only may not implement fsync(2).
        if rustix::fs::fstatvfs(file)?
            .f_flag
            .contains(StatVfsMountFlags::RDONLY)
        {
            return Ok(());
        }
        file.sync_all()?;
        File::open(&self.0)?.sync_all()
    }

    /// Replaces the identity: the private key followed by its certificate chain.
    pub(crate) fn write_identity(&self, identity_pem: &str) -> Result<(), StateError> {
        self.replace(IDENTITY, identity_pem.as_bytes())
    }

    /// File with the authorities to trust for the gateway; `None` for those of the system.
    pub(crate) fn gateway_authorities_file(&self) -> Option<PathBuf> {
        Some(self.0.join(GATEWAY_CA)).filter(|path| path.exists())
    }

    /// Reads the authorities to trust for the gateway; `None` for those of the system.
    pub fn gateway_authorities(&self) -> Result<Option<Vec<CertificateDer<'static>>>, StateError> {
        let Some(path) = self.gateway_authorities_file() else {
            return Ok(None);
        };
        pem::read_certificates(&path)
            .map(Some)
            .map_err(|error| StateError::Pem {
                path: name(&path),
                error,
            })
    }

    /// Keeps the backend of `gw-agent http`, which is in no configuration file.
    pub(crate) fn keep_http_backend(&self, url: &str) -> Result<(), StateError> {
        if self.http_backend().as_deref() == Some(url) {
            return Ok(());
        }
        self.replace(HTTP_BACKEND, url.as_bytes())
    }

    /// The backend of the last `gw-agent http` with this folder.
    pub(crate) fn http_backend(&self) -> Option<String> {
        fs::read_to_string(self.0.join(HTTP_BACKEND)).ok()
    }

    /// Reads the unfinished enrollment, if any.
    pub(crate) fn pending(&self) -> Result<Option<PendingEnrollment>, StateError> {
        self.read_json_if_there(PENDING)
    }

    pub(crate) fn write_pending(&self, pending: &PendingEnrollment) -> Result<(), StateError> {
        self.write_json(PENDING, pending)
    }

    pub(crate) fn remove_pending(&self) -> Result<(), StateError> {
        self.remove(PENDING)
    }

    /// Completes an enrollment. After a crash in between, the enrollment can be resumed.
    pub(crate) fn complete(
        &self,
        enrollment: &Enrollment,
        identity_pem: &str,
        gateway_ca_pem: Option<&str>,
    ) -> Result<(), StateError> {
        // A previous agent's enrollment must not be combined with the new identity.
        self.remove(ENROLLMENT)?;
        match gateway_ca_pem {
            Some(pem) => self.replace(GATEWAY_CA, pem.as_bytes())?,
            None => self.remove(GATEWAY_CA)?,
        }
        self.write_identity(identity_pem)?;
        self.write_enrollment(enrollment)?;
        self.remove_pending()
    }

    pub(crate) fn read_json_if_there<T: DeserializeOwned>(
        &self,
        file: &str,
    ) -> Result<Option<T>, StateError> {
        if self.0.join(file).exists() {
            self.read_json(file).map(Some)
        } else {
            Ok(None)
        }
    }

    fn read_json<T: DeserializeOwned>(&self, file: &str) -> Result<T, StateError> {
        let path = self.0.join(file);
        let text = fs::read(&path).map_err(|error| StateError::io(&path, error))?;
        serde_json::from_slice(&text).map_err(|error| StateError::Json {
            path: name(&path),
            error,
        })
    }

    pub(crate) fn write_json(&self, file: &str, value: &impl Serialize) -> Result<(), StateError> {
        let text = serde_json::to_vec_pretty(value).map_err(|error| StateError::Json {
            path: name(&self.0.join(file)),
            error,
        })?;
        self.replace(file, &text)
    }

    /// Replaces a file atomically.
    fn replace(&self, file: &str, contents: &[u8]) -> Result<(), StateError> {
        let path = self.0.join(file);
        files::write_private(&path, contents).map_err(|error| StateError::io(&path, error))
    }

    fn remove(&self, file: &str) -> Result<(), StateError> {
        let path = self.0.join(file);
        files::remove_if_there(&path).map_err(|error| StateError::io(&path, error))
    }
}

fn name(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::later_member::pass;

    fn enrollment() -> Enrollment {
        Enrollment {
            agent_id: AgentId::random(),
            gateway_name: "eu1.example.com".into(),
            gateway_host: "127.0.0.1".into(),
            gateway_port: 8443,
            services: vec!["acme--api.eu1.example.com".into()],
            later: LaterMembers::default(),
        }
    }

    #[test]
    fn enrollment_is_stored_in_private_files() {
        let parent = tempfile::tempdir().unwrap();
        let state = StateDir::new(parent.path().join("deep/state"));
        state.create().unwrap();
        assert!(!state.is_enrolled() && state.pending().unwrap().is_none());
        let enrollment = enrollment();
        let completed = state.complete(&enrollment, "identity", Some("authority"));
        completed.unwrap();
        assert_eq!(state.enrollment().unwrap(), enrollment);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(state.path()), 0o700);
        let mut files: Vec<String> = Vec::new();
        for entry in fs::read_dir(state.path()).unwrap() {
            let entry = entry.unwrap();
            assert_eq!(mode(&entry.path()), 0o600, "{entry:?}");
            files.push(entry.file_name().into_string().unwrap());
        }
        files.sort();
        assert_eq!(files, ["agent.json", "gateway-ca.crt", "identity.pem"]);
    }

    #[test]
    fn new_enrollment_replaces_all_files_of_the_old_one() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir::new(directory.path());
        let completed = state.complete(&enrollment(), "old", Some("authority"));
        completed.unwrap();
        fs::write(directory.path().join("identity.pem.new"), "left over").unwrap();
        state.complete(&enrollment(), "new", None).unwrap();
        assert!(state.gateway_authorities().unwrap().is_none());
        let identity = fs::read_to_string(directory.path().join("identity.pem"));
        assert_eq!(identity.unwrap(), "new");
    }

    #[test]
    fn folder_is_locked_by_one_process_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir::new(directory.path());
        let lock = state.lock().unwrap();
        let error = state.lock().unwrap_err();
        assert!(matches!(error, StateError::InUse { .. }));
        let by = format!(
            "{} is in use by another gw-agent process (pid {})",
            directory.path().display(),
            std::process::id()
        );
        assert!(error.to_string().starts_with(&by), "{error}");
        // Under the lock, files can still be replaced and read.
        state.write_enrollment(&enrollment()).unwrap();
        assert!(state.enrollment().is_ok() && state.lock().is_err());
        // A child process has a copy of every open file until exec.
        let copy = lock.folder.as_ref().unwrap().try_clone().unwrap();
        drop(lock);
        assert!(state.lock().is_ok());
        drop(copy);
    }

    #[test]
    fn errors_name_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir::new(directory.path());
        let error = state.enrollment().unwrap_err().to_string();
        assert!(error.contains("agent.json"), "{error}");
        fs::write(directory.path().join("identity.pem"), "no key").unwrap();
        let error = state.identity().err().unwrap().to_string();
        assert!(error.contains("identity.pem"), "{error}");
    }

    #[test]
    fn files_keep_members_of_a_later_version() {
        assert_eq!(pass(&enrollment(), &[]), [""]);
        let pending = PendingEnrollment {
            gateway_name: "eu1.example.com".into(),
            gateway_host: "127.0.0.1".into(),
            gateway_port: 8443,
            gateway_ca_pem: Some("authority".into()),
            token_id: EnrollmentTokenId::random(),
            enrollment_id: EnrollmentId::random(),
            agent_id: Some(AgentId::random()),
            enrollment_secret: "secret".into(),
            key_pem: "key".into(),
            later: LaterMembers::default(),
        };
        assert_eq!(pass(&pending, &[]), [""]);
    }
}
