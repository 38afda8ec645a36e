//! Work for own domains that runs at once, with a share for each account.

use std::collections::HashMap;
use std::future::pending;

use futures_util::StreamExt;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::FuturesUnordered;
use gw_shared::id::{AccountId, DomainName};
use gw_store::DomainRecord;

/// Places for pieces of work, one for each domain. An account has at most half of them.
pub(super) struct Places<T> {
    count: usize,
    work: FuturesUnordered<BoxFuture<'static, (DomainName, T)>>,
    /// Accounts of the domains for which work runs.
    taken: HashMap<DomainName, AccountId>,
}

impl<T: 'static> Places<T> {
    pub(super) fn new(count: usize) -> Self {
        Self {
            count,
            work: FuturesUnordered::new(),
            taken: HashMap::new(),
        }
    }

    pub(super) fn are_free(&self) -> bool {
        self.taken.is_empty()
    }

    /// Whether work for the domain runs.
    pub(super) fn has(&self, domain: &DomainName) -> bool {
        self.taken.contains_key(domain)
    }

    /// Chooses the domains whose work begins now, from those in `due`. Accounts with the least work
    /// come first, then the lowest ranks.
    pub(super) fn choose<'a, R: Ord + Copy>(
        &self,
        mut due: Vec<(R, &'a DomainRecord)>,
    ) -> Vec<(R, &'a DomainRecord)> {
        let free = self.count.saturating_sub(self.taken.len());
        let mut shares: HashMap<&AccountId, usize> = HashMap::new();
        for account in self.taken.values() {
            *shares.entry(account).or_default() += 1;
        }
        due.sort_by_key(|(rank, _)| *rank);
        let mut chosen = Vec::new();
        for share in 0..self.count / 2 {
            if chosen.len() == free {
                break;
            }
            due.retain(|(rank, record)| {
                let taken = shares.entry(&record.account).or_default();
                let is_chosen = chosen.len() < free && *taken == share;
                if is_chosen {
                    *taken += 1;
                    chosen.push((*rank, *record));
                }
                !is_chosen
            });
        }
        chosen
    }

    /// Begins work for a domain.
    pub(super) fn begin(
        &mut self,
        domain: DomainName,
        account: AccountId,
        work: impl Future<Output = T> + Send + 'static,
    ) {
        self.taken.insert(domain.clone(), account);
        self.work.push(work.map(|result| (domain, result)).boxed());
    }

    /// Waits for the end of a piece of work, and returns its result. Never returns if no work runs.
    /// A future that is dropped loses no result.
    pub(super) async fn ended(&mut self) -> (DomainName, T) {
        let Some((domain, result)) = self.work.next().await else {
            return pending().await;
        };
        self.taken.remove(&domain);
        (domain, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::records::domain::tests::record_of;

    fn records(names: &[(&str, &str)]) -> Vec<DomainRecord> {
        let record = |(account, name): &(&str, &str)| DomainRecord {
            id: DomainName::new(name).unwrap(),
            ..record_of(account, "api")
        };
        names.iter().map(record).collect()
    }

    fn chosen(places: &Places<()>, records: &[DomainRecord], ranks: &[u32]) -> Vec<String> {
        let due = ranks.iter().copied().zip(records).collect();
        let chosen = places.choose(due).into_iter();
        chosen.map(|(_, record)| record.id.to_string()).collect()
    }

    #[test]
    fn accounts_share_the_places_and_the_lowest_ranks_come_first() {
        let mut places: Places<()> = Places::new(4);
        let records = records(&[
            ("acme", "a.test"),
            ("acme", "b.test"),
            ("acme", "c.test"),
            ("rival", "d.test"),
        ]);
        let begin =
            |places: &mut Places<()>, record: &DomainRecord, work: BoxFuture<'static, ()>| {
                places.begin(record.id.clone(), record.account.clone(), work);
            };
        assert!(places.are_free());
        // An account has half of the places, and one that has none is served first.
        assert_eq!(
            chosen(&places, &records, &[3, 1, 2, 9]),
            ["b.test", "d.test", "c.test"]
        );
        begin(&mut places, &records[1], pending().boxed());
        assert!(places.has(&records[1].id) && !places.has(&records[0].id));
        let others = [&records[0..1], &records[2..]].concat();
        assert_eq!(chosen(&places, &others, &[3, 2, 9]), ["d.test", "c.test"]);
        begin(&mut places, &records[2], async {}.boxed());
        assert_eq!(chosen(&places, &others[..1], &[0]), [""; 0]);

        // Work that ends leaves its place.
        let (ended, ()) = places.ended().now_or_never().unwrap();
        assert_eq!(ended, records[2].id);
        assert_eq!(chosen(&places, &others[..1], &[0]), ["a.test"]);
        assert!(places.ended().now_or_never().is_none());
    }

    #[test]
    fn no_more_work_begins_than_there_are_places() {
        let names: Vec<String> = (0..9).map(|number| format!("account{number}")).collect();
        let named: Vec<_> = names.iter().map(|it| (it.as_str(), "a.test")).collect();
        let records = records(&named);
        let places: Places<()> = Places::new(4);
        let ranks: Vec<u32> = (0..9).rev().collect();
        let chosen = places.choose(ranks.into_iter().zip(&records).collect());
        let ranks: Vec<u32> = chosen.iter().map(|(rank, _)| *rank).collect();
        assert_eq!(ranks, [0, 1, 2, 3]);
    }
}
