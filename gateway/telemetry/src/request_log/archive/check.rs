//! Check of the store for `doctor`: writes, reads and deletes an object.

use gw_region::RegionKeys;

use super::s3::S3Bucket;
use super::seal::ObjectSealing;
use super::{ArchiveError, ArchiveSettings};

/// Step of the check, for its advice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckStep {
    /// Sealing and writing the object.
    Write,
    /// Listing the folder of the object.
    List,
    /// Reading and opening the object.
    Read,
    /// Deleting the object.
    Delete,
}

/// Writes, lists, reads and deletes a small object. Returns the place of the archive, or the step
/// that failed.
pub fn check(
    settings: &ArchiveSettings,
    keys: &RegionKeys,
    apex: &str,
) -> Result<String, (CheckStep, ArchiveError)> {
    const CONTENT: &[u8] = b"written by gw-gateway doctor";
    let bucket = S3Bucket::new(settings).map_err(|error| (CheckStep::Write, error))?;
    let folder = format!("{apex}/doctor");
    let name = format!("{folder}/{}", gw_shared::id::RequestIds::new().next_id());
    let at = |step| move |error| (step, error);
    let key = ObjectSealing::new(keys)
        .object(&name)
        .map_err(at(CheckStep::Write))?;
    let mut sealed = Vec::new();
    key.seal(0, CONTENT.to_vec(), &mut sealed)
        .map_err(at(CheckStep::Write))?;
    bucket.put(&name, &sealed).map_err(at(CheckStep::Write))?;
    let listed = bucket
        .objects(&folder, usize::MAX)
        .map_err(at(CheckStep::List));
    let read = bucket.get(&name, None).map_err(at(CheckStep::Read));
    // Also if it cannot be read.
    bucket.delete(&name).map_err(at(CheckStep::Delete))?;
    if !listed?.contains(&name) {
        let reason = "the object that was just written is not listed".to_owned();
        return Err((
            CheckStep::List,
            ArchiveError::Store {
                action: "list",
                name: folder,
                reason,
            },
        ));
    }
    match read?
        .map(|sealed| key.open(0, sealed))
        .transpose()
        .map_err(at(CheckStep::Read))?
    {
        Some(content) if content == CONTENT => Ok(bucket.place().to_owned()),
        _ => {
            let reason = "it is not as it was written".to_owned();
            Err((
                CheckStep::Read,
                ArchiveError::Store {
                    action: "read",
                    name,
                    reason,
                },
            ))
        }
    }
}
